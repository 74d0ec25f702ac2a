"""The settings of `profile`: closed choices and ranges, all checked at once."""

import math
from pathlib import Path
from typing import Any

import pytest

from latency.candidates.candidate import Candidate
from serve.bundle.cpu import available_cores
from serve.errors import BadInput
from stillroom.verbs.profile import Profiling
from stillroom.verbs.profile.papers_table import for_the_paper, profile_paper, runtimes
from stillroom.verbs.profile.run import ways_of, with_lengths


def test_every_setting_that_cannot_be_is_named_in_one_message() -> None:
    wrong: dict[str, Any] = {
        "device": ("tpu",), "runtimes": ("torch", "tensorflow"), "precisions": ("int4",), "batches": (1, 0), "lengths": (0,),
        "seconds": math.nan, "tight": 0.0, "threads": -1, "budget_ms": -3.0, "percentile": 42, "bound_ms": math.inf,
        "price_per_core_hour": -0.1,
    }  # fmt: skip
    with pytest.raises(BadInput) as refused:
        Profiling(**wrong)
    for name in wrong:
        assert "--" + name.replace("_", "-") in refused.value.message
    for known in ("cpu, cuda", "torch-cuda-graphs", "bf16"):
        assert known in refused.value.message


@pytest.mark.parametrize("name", ["batches", "lengths"])
@pytest.mark.parametrize("value", ["1,x", (1, "x"), (True,), (1.5,)])
def test_the_grid_is_of_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"--{name} "):
        Profiling(**{name: value})


@pytest.mark.parametrize(
    ("takes", "measured"),
    [((None,), (16, 128)), ((512, None), (16, 128)), ((512, 32), (16, 32)), ((16,), (16,)), ((8,), (8,))],
)
def test_default_lengths_are_cut_to_what_the_models_take(
    takes: tuple[int | None, ...], measured: tuple[int, ...]
) -> None:
    models = [Candidate(f"model {i}", "torch", "fp32", Path(), 1, max_length=most) for i, most in enumerate(takes)]
    assert with_lengths(Profiling(), models).lengths == measured
    asked = Profiling(lengths=(16, 128))
    if min(most or 512 for most in takes) >= 128:
        assert with_lengths(asked, models) == asked
    else:
        with pytest.raises(BadInput, match=r"--lengths has 128 tokens, and model \d takes"):
            with_lengths(asked, models)


def test_threads_are_the_cores_and_a_runtime_that_needs_a_gpu_asks_for_one_unless_told_otherwise() -> None:
    assert ways_of(Profiling()).threads == available_cores()
    assert ways_of(Profiling(threads=3)).threads == 3
    assert ways_of(Profiling()).devices == ("cpu",)
    assert ways_of(Profiling(runtimes=("torch-cuda-graphs",))).devices == ("cpu", "cuda")
    with pytest.raises(BadInput, match="--runtimes torch-cuda-graphs needs cuda"):
        ways_of(Profiling(runtimes=("torch-cuda-graphs",), device=("cpu",)))


def test_the_papers_table_refuses_every_setting_that_it_would_ignore() -> None:
    given: dict[str, Any] = {
        "data": "texts.txt", "batches": (1, 4), "budget_ms": 5.0, "percentile": 90, "bound_ms": 20.0,
        "price_per_core_hour": 0.1, "sweep": True,
    }  # fmt: skip
    with pytest.raises(BadInput) as refused:
        profile_paper(Profiling(**given))
    assert all("--" + name.replace("_", "-") in refused.value.message for name in given)


def test_the_papers_table_honours_the_other_settings() -> None:
    usual = for_the_paper(Profiling())
    assert (usual.batches, usual.runtimes) == ((1,), runtimes(["cpu"]))
    on_both = ways_of(Profiling(paper=True, device=("cpu", "cuda")))
    assert (on_both.precisions_on("cpu"), on_both.precisions_on("cuda")) == (("fp32",), ("fp32", "fp16"))
    in_full = ways_of(Profiling(paper=True, device=("cuda",), precisions=("fp32",)))
    assert in_full.precisions_on("cuda") == ("fp32",)
    asked = Profiling(precisions=("bf16",), batches=(1,), runtimes=("torch",), lengths=(64,), threads=1, seed=5)
    assert for_the_paper(asked) == Profiling(
        device=("cpu",), precisions=("bf16",), batches=(1,), runtimes=("torch",), lengths=(64,), threads=1, seed=5
    )
