"""Lets relations be learned from teacher layers that live (`compress.models.living_layers`), not from layers that pass on."""

from collections.abc import Sequence
from dataclasses import replace

from compress.methods.catalogue import Stage
from compress.models.living_layers import LIVES, living_layers, nearest_living

RELATIONS = ("kl", "relation", "direct")  # losses of MiniLM, MiniLMv2 and DirectMiniLM


def learns_relations(stage: Stage) -> bool:
    """Whether `stage` learns attention or relations, which are made inside a layer, and not hidden states alone."""
    return any(term.loss in RELATIONS for term in stage.objective.layers)


def on_living_layers(stage: Stage, changes: Sequence[float]) -> tuple[Stage, tuple[str, ...]]:
    """`stage` with living teacher layers in place of dead ones, and a message for each layer that is dead.

    A dead layer gives way to the nearest that lives. It stays, with a warning, if the user named it or if no layer lives.

    Args:
        stage: one that `learns_relations`.
        changes: the teacher's `relative_changes`.
    """
    terms = stage.objective.layers
    dead = sorted({term.teacher_layer for term in terms} - {0, *living_layers(changes)})
    said = []
    for layer in dead:
        other = nearest_living(layer, changes)
        why = f"layer {layer} of the teacher changes its input by {changes[layer - 1]:.1%}, less than {LIVES:.0%}"
        if other == layer:
            said.append(f"warning: {why}, and no other layer does more. Relations are learned from layer {layer}.")
        elif stage.layer_is_given:
            said.append(
                f"warning: {why}. --teacher-layer names it, so it is kept; the nearest that does more is {other}."
            )
        else:
            said.append(f"Relations are learned from layer {other}, not {layer}: {why}.")
    if not dead or stage.layer_is_given:
        return stage, tuple(said)
    moved = tuple(
        replace(term, teacher_layer=nearest_living(term.teacher_layer, changes)) if term.teacher_layer in dead else term
        for term in terms
    )
    return replace(stage, objective=replace(stage.objective, layers=moved)), tuple(said)
