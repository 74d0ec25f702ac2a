"""The settings of `stillroom demo`."""

from dataclasses import dataclass

from serve.options import setting


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Where the demo writes."""

    out: str = setting("demo", help="The bundle to write.", metavar="FOLDER")
