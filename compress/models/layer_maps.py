"""Which teacher layers each student layer learns from. Layers are numbered from 1."""

from serve.errors import BadInput

LAYER_MAPS = ("single", "last", "uniform", "uniform-consecutive", "uniform+last")


def layer_map(name: str, teacher_layers: int, student_layers: int) -> dict[int, tuple[int, ...]]:
    """For each student layer that learns from any: the teacher layers (comparative analysis, section 3.1).

    With `k = ceil(L / M)` of `L` teacher and `M` student layers, `single` is only `M` from `L`; `last` is `i` from
    `L - M + i`; `uniform` is `i` from `k i`; `uniform-consecutive` is `i` from `k (i - 1) + 1` to `k i`; `uniform+last` is
    the two together. Numbers past `L` drop out.

    Raises:
        BadInput: an unknown map, or a student deeper than its teacher.

    >>> layer_map("uniform-consecutive", 12, 6)[2], layer_map("uniform+last", 6, 3)
    ((3, 4), {1: (2, 4), 2: (4, 5), 3: (6,)})
    """
    if name not in LAYER_MAPS:
        raise BadInput(f"The layer map {name!r} is not known; it is one of {', '.join(LAYER_MAPS)}.")
    if student_layers > teacher_layers:
        raise BadInput(
            f"A layer map needs a student no deeper than its teacher; {student_layers} layers cannot be mapped to {teacher_layers}. "
            "Take a shallower student, or a method without a layer map (minilm, minilmv2, directminilm)."
        )
    step = -(-teacher_layers // student_layers)
    found: dict[int, tuple[int, ...]] = {}
    for i in range(1, student_layers + 1):
        chosen = {
            "single": [teacher_layers] if i == student_layers else [],
            "last": [teacher_layers - student_layers + i],
            "uniform": [step * i],
            "uniform-consecutive": list(range(step * (i - 1) + 1, step * i + 1)),
            "uniform+last": sorted({step * i, teacher_layers - student_layers + i}),
        }[name]
        inside = tuple(layer for layer in chosen if 1 <= layer <= teacher_layers)
        if inside:
            found[i] = inside
    return found
