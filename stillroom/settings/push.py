"""The settings of `stillroom push`."""

from dataclasses import dataclass

from serve.options import Settings, setting


@dataclass(frozen=True)
class Pushing(Settings):
    """What an upload may do to what is there."""

    replace: bool = setting(False, help="Replace another bundle at the URL, or upload the same one again.")
    public: bool = setting(
        False, help="Create the repository on the Hub for everyone to read, or push to a public one."
    )
