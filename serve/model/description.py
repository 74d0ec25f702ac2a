"""How a server describes one of its models."""

from typing import TypedDict


class ModelDescription(TypedDict):
    """One model of this server."""

    name: str
    aliases: list[str]
    task: str
    labels: list[str]
    vector_width: int
    multi_label: bool
    relations: bool
    max_length: int
    variant: str
    variants: list[str]
    promises: list[str]
    device: str
    digest: str
