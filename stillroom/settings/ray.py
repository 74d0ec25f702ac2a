"""The settings of `stillroom.ray`, beside those of `stillroom serve`."""

from dataclasses import dataclass

from serve.errors import BadInput
from serve.options import check, setting


@dataclass(frozen=True, kw_only=True)
class RayServing:
    """What Ray Serve is told of a deployment."""

    bundle: tuple[str, ...] = setting(
        help="Folder or URL of a bundle; a folder must be at the same path on every machine."
    )
    replicas: int = setting(1, help="Replicas; with max_replicas the fewest.", at_least=1)
    max_replicas: int | None = setting(
        None, help="Most replicas that Ray Serve's autoscaler starts.", at_least=1, shown="no autoscaling"
    )
    target_ongoing_requests: float = setting(
        8.0, help="Requests under way in a replica, on average, that the autoscaler aims at.", above=0
    )
    max_ongoing_requests: int = setting(
        1000,
        help="Most requests under way in a replica; others wait at Ray Serve's proxy, where no limit of stillroom holds.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise BadInput(
                f"max_replicas is {self.max_replicas}, and replicas, the fewest, is {self.replicas}; give at least as many"
            )
