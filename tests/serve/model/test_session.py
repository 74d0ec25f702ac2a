import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from lookup_bundles import city_table, intent_table
from tokenizers import Encoding

from serve.errors import BundleError
from serve.model.session import Session, padded_length
from serve.text.tokenizer import load_tokenizer


def encode(bundle: Path, *texts: str | tuple[str, str]) -> list[Encoding]:
    return load_tokenizer(bundle, 32).encode_batch(list(texts))


def test_token_logits_are_the_models_one_row_per_token(entities_bundle: Path) -> None:
    encodings = encode(entities_bundle, "fly to rome", "oslo")

    long, short = Session(entities_bundle / "onnx" / "model.onnx", threads=1).run(encodings)

    assert long.shape == (5, 3)
    assert short.shape == (3, 3)
    np.testing.assert_array_equal(long, city_table()[encodings[0].ids].astype(np.float32))
    np.testing.assert_array_equal(short, city_table()[encodings[1].ids].astype(np.float32))


def test_text_logits_leave_the_padding_out_and_see_the_token_types(intents_bundle: Path) -> None:
    encodings = encode(intents_bundle, ("love it", "rome"), "refund", "fly to rome please and so on")

    rows = Session(intents_bundle / "onnx" / "model.onnx", threads=1).run(encodings)

    for row, encoding in zip(rows, encodings, strict=True):
        expected = (intent_table()[encoding.ids] + 0.25 * np.array(encoding.type_ids)[:, None]).mean(axis=0)
        np.testing.assert_allclose(row, expected, rtol=1e-6)
    assert sum(encodings[0].type_ids) == 2


def test_a_text_alone_and_in_company_gives_the_same_bits(entities_bundle: Path) -> None:
    session = Session(entities_bundle / "onnx" / "model.onnx")
    encodings = encode(entities_bundle, "rome", "fly from new york to münchen please", "", "a b a b a b")
    alone = [session.run([encoding])[0] for encoding in encodings]
    for ours, theirs in zip(session.run(encodings), alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_no_texts_give_no_logits(entities_bundle: Path) -> None:
    assert Session(entities_bundle / "onnx" / "model.onnx").run([]) == []


def test_threads_are_as_asked_or_those_available(entities_bundle: Path) -> None:
    assert Session(entities_bundle / "onnx" / "model.onnx", threads=3).threads == 3
    assert Session(entities_bundle / "onnx" / "model.onnx").threads >= 1


def test_a_file_that_is_no_graph_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"model\.onnx does not open in onnxruntime"):
        Session(tmp_path / "model.onnx")


def test_a_graph_with_another_interface_is_refused(entities_bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(entities_bundle / "onnx" / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["pixels" if name == "input_ids" else name for name in node.input]
    model.graph.input[0].name = "pixels"
    onnx.save(model, tmp_path / "pixels.onnx")
    with pytest.raises(BundleError, match=r"has inputs other than .*: pixels"):
        Session(tmp_path / "pixels.onnx")

    model = onnx.load(entities_bundle / "onnx" / "model.onnx")
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    onnx.save(model, tmp_path / "scores.onnx")
    with pytest.raises(BundleError, match="one must be called logits"):
        Session(tmp_path / "scores.onnx")


def test_a_tokenizer_that_pads_to_128_and_cuts_at_4_does_neither_here(entities_bundle: Path) -> None:
    tokenizer = load_tokenizer(entities_bundle, 6)
    assert len(tokenizer.encode("rome")) == 3
    cut = tokenizer.encode("fly to rome and oslo")
    assert len(cut) == 6
    assert cut.overflowing
    assert not tokenizer.encode("fly to rome a").overflowing


def test_a_tokenizer_that_cannot_be_used_is_refused(entities_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path, 32)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="is not a tokenizer"):
        load_tokenizer(tmp_path, 32)
    with pytest.raises(BundleError, match="must be at least 3"):
        load_tokenizer(entities_bundle, 2)


# In an interpreter of its own, with every way out watched: the runtime's Python package brings a telemetry package with it.
OPENVINO_PROGRAM = """
import socket, sys, urllib.request
from pathlib import Path
called = []
def watched(*arguments, **keywords):
    called.append(arguments)
    raise OSError("no network here")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = urllib.request.urlopen = watched
from serve.text.tokenizer import load_tokenizer
from serve.model.session import Session
folder = Path(sys.argv[1])
encodings = load_tokenizer(folder, 32).encode_batch(["fly to rome", "oslo"])
answers = Session(folder / "onnx" / "model.onnx", 1, "openvino").run(encodings)
assert [answer.shape for answer in answers] == [(5, 3), (3, 3)]
assert not called, called
"""


def test_openvino_answers_and_tells_nobody(entities_bundle: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", OPENVINO_PROGRAM, entities_bundle], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_file_that_openvino_cannot_open_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"model\.onnx .*OpenVINO"):
        Session(tmp_path / "model.onnx", 1, "openvino")


def test_without_openvino_the_error_says_how_to_install_it(
    entities_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BundleError, match=r"model\.onnx .*pip install '\.\[openvino\]'"):
        Session(entities_bundle / "onnx" / "model.onnx", 1, "openvino")


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from serve.model.session import Session

graph = Path(sys.argv[1]) / "onnx" / "model.onnx"
first, second = Session(graph, 1, "openvino"), Session(graph, 1, "openvino")
del first
del second
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_works_after_sessions_in_openvino(entities_bundle: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, entities_bundle], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_in_openvino_texts_are_padded_to_whole_vectors_but_not_beyond_the_positions() -> None:
    assert [padded_length(tokens, "openvino", None) for tokens in (0, 1, 16, 17)] == [16, 16, 16, 32]
    assert [padded_length(tokens, "openvino", 20) for tokens in (3, 17, 20)] == [16, 20, 20]
    assert [padded_length(tokens, "onnxruntime", None) for tokens in (0, 1, 17)] == [1, 1, 17]
