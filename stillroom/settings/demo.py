"""The settings of `stillroom demo`."""

from dataclasses import dataclass

from compress.settings import Output
from serve.options import again


@dataclass(frozen=True, kw_only=True)
class Demo(Output):
    """Where the demo writes."""

    out: str = again(Output, "out", "demo", help="The bundle to write.")
