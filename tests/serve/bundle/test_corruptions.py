from pathlib import Path

from benchmarks.export.corruptions import unnoticed


def test_every_one_of_many_random_corruptions_is_refused_by_name(entities_bundle: Path) -> None:
    passed, outcomes = unnoticed(entities_bundle, count=400, seed=1)
    assert not passed
    assert outcomes == {"named": 400}
