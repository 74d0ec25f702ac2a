"""Maps from each student layer to the teacher layers that it learns from. Layers are numbered from 1."""

from serve.errors import BadInput
from serve.wording import one_of

LAYER_MAPS = ("single", "last", "uniform", "uniform-consecutive", "uniform+last", "spread")


def layer_map(name: str, teacher_layers: int, student_layers: int) -> dict[int, tuple[int, ...]]:
    """The teacher layers of each student layer that learns from any (comparative analysis, section 3.1).

    With `L` teacher layers, `M` student layers and `k = ceil(L / M)`, student layer `i` learns by `single` from `L` if `i = M`
    and from none otherwise; by `last` from `L - M + i`; by `uniform` from `k i`; by `uniform-consecutive` from `k (i - 1) + 1`
    to `k i`; by `uniform+last` from the layers of both maps. Layers above `L` are left out, so where `M` does not divide `L` the
    uniform maps leave the last student layers without a teacher layer. `spread` (ours) is `spread_layers`, which fits any `L` and `M`.

    Raises:
        BadInput: an unknown map, or a student deeper than its teacher.

    >>> layer_map("uniform-consecutive", 12, 6)[2], layer_map("uniform+last", 6, 3)
    ((3, 4), {1: (2, 4), 2: (4, 5), 3: (6,)})
    """
    if name not in LAYER_MAPS:
        raise BadInput(f"--layer-map {name} is not known. Give {one_of(LAYER_MAPS)}.")
    if student_layers > teacher_layers:
        raise BadInput(
            f"A layer map needs a student no deeper than its teacher; the student has {student_layers} layers and the teacher "
            f"{teacher_layers}. Give a shallower student, or a method without a layer map (minilm, minilmv2 or directminilm)."
        )
    step = -(-teacher_layers // student_layers)
    found: dict[int, tuple[int, ...]] = {}
    for i in range(1, student_layers + 1):
        chosen = {
            "single": [teacher_layers] if i == student_layers else [],
            "last": [teacher_layers - student_layers + i],
            "uniform": [step * i],
            "spread": [spread_layers(teacher_layers, student_layers)[i - 1]],
            "uniform-consecutive": list(range(step * (i - 1) + 1, step * i + 1)),
            "uniform+last": sorted({step * i, teacher_layers - student_layers + i}),
        }[name]
        inside = tuple(layer for layer in chosen if 1 <= layer <= teacher_layers)
        if inside:
            found[i] = inside
    return found


def spread_layers(teacher_layers: int, student_layers: int) -> tuple[int, ...]:
    """One teacher layer for each student layer, evenly spread, ending with the last: `ceil(i L / M)`.

    >>> spread_layers(12, 3), spread_layers(6, 4)
    ((4, 8, 12), (2, 3, 5, 6))
    """
    return tuple(-(-(i * teacher_layers) // student_layers) for i in range(1, student_layers + 1))


def covering(name: str, teacher_layers: int, student_layers: int) -> str:
    """The map `name`, or `spread` where `name` leaves the student's last layer without a teacher layer.

    >>> covering("uniform", 12, 6), covering("uniform", 12, 5)
    ('uniform', 'spread')
    """
    return name if student_layers in layer_map(name, teacher_layers, student_layers) else "spread"
