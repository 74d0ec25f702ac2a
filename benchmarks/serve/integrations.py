"""Run the code of docs/integrations.md in each client's own environment, and count the texts whose answer is that of `/v1`.

    python benchmarks/serve/integrations.py URL TEXTS FOLDER BUNDLES [--texts 300]

`URL` is a server of the four models that the page names, `TEXTS` a file with a text a line. `FOLDER` has a virtual environment, or a folder
with `node_modules`, for each section of the page, of its name; a section without one is left out. `BUNDLES` has the bundles `my-vectors`
and `my-reader`, which answers questions, for the libraries that read files. Prints a line for each passage of code.
"""

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from serve.model.pipeline import Pipeline

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
WRITTEN = "http://127.0.0.1:8000"
WRITTEN_FOLDER = "/srv/bundles"
QUESTION = "what is the city"
# What answers are compared as: entities of any form, labels, places in an order, or vectors brought to length 1.
AFTER = """
import json as _json
def _plain(answer):
    if isinstance(answer, list) and not (answer and isinstance(answer[0], float)):
        get = lambda each, *names: next(filter(lambda value: value is not None, (
            each.get(name) if isinstance(each, dict) else getattr(each, name, None) for name in names)))
        return [[get(each, "entity_group", "entity_type", "label"), get(each, "start"), get(each, "end")] for each in answer]
    return answer
print(_json.dumps([_plain(answer) for answer in answers]))
"""


def passages() -> Iterator[tuple[str, str]]:
    """The section and the code of each passage of the page."""
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        for code in re.findall(r"^```(?:python|js)\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            yield section.partition("\n")[0], code


def is_script(code: str) -> bool:
    """Whether `code` is in JavaScript."""
    return "const answers" in code


def answers_of(environment: Path, code: str, url: str, texts: list[str], bundles: Path) -> list[Any]:
    """What `code` leaves in `answers`, run in `environment` with `texts` for a server at `url` and the files of `bundles`."""
    here = code.replace(WRITTEN, url).replace(WRITTEN.removeprefix("http://"), url.removeprefix("http://"))
    here = here.replace(WRITTEN_FOLDER, str(bundles))
    program = f"texts = {json.dumps(texts)}\n{here}\n{AFTER}"
    command = [str(environment / "bin" / "python"), "-"]
    if is_script(code):
        program = f"const texts = {json.dumps(texts)};\n{here}\nconsole.log(JSON.stringify(answers));"
        command = ["node", "--input-type=module", "-"]  # which looks for packages in the folder that it runs in
    alone = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE"}
    }
    ran = subprocess.run(
        command, input=program, capture_output=True, text=True, env=alone, cwd=environment, check=False
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr[-3000:])
    found: list[Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def own_answers(code: str, url: str, texts: list[str], bundles: Path) -> list[Any]:
    """The answers of `/v1` to what `code` asks; of a bundle's own float32 graph, where it reads files."""
    if "my-reader" in code:
        told = Pipeline(bundles / "my-reader", "fp32")([QUESTION] * len(texts), text_pair=texts)
        return [answer["answer"]["text"] if answer["answer"] else "" for answer in told]
    if WRITTEN_FOLDER in code:
        return [answer["embedding"] for answer in Pipeline(bundles / "my-vectors", "fp32")(texts)]
    if "rank" in code:
        told = _post(f"{url}/v1/score", text=[texts[0]] * len(texts), text_pair=texts)["results"]
        return sorted(range(len(texts)), key=lambda place: -told[place]["score"])
    if "my-vectors" in code:
        return [each["embedding"] for each in _post(f"{url}/v1/embeddings", input=texts, model="my-vectors")["data"]]
    if "my-classifier" in code:
        told = _post(f"{url}/v1/classify", text=texts, model="my-classifier")["results"]
        return [each["labels"][0]["label"] for each in told]
    told = _post(f"{url}/v1/entities", text=texts, model="my-tagger")["results"]
    return [[[each["label"], each["start"], each["end"]] for each in answer["entities"]] for answer in told]


def letters(text: str) -> str:
    """`text` without blanks, capitals and marks of tokens, which differ where an answer is put together from tokens."""
    return "".join(text.lower().replace("##", "").split())


def answered(told: list[str], own: list[str]) -> tuple[list[str], list[str]]:
    """The letters of both answers to each question that the bundle itself answers: libraries decide otherwise what has no answer."""
    return [letters(one) for one, ours in zip(told, own, strict=True) if ours], [letters(ours) for ours in own if ours]


def agreeing(told: list[Any], own: list[Any]) -> int:
    """How many answers are alike; of vectors, those of which no number differs by more than 1e-5 at length 1."""
    if len(told) != len(own):
        return 0
    return sum(map(_alike, told, own))


def _alike(told: Any, own: Any) -> bool:
    return distance(told, own) < 1e-5 if _is_vector(own) else bool(told == own)


def _is_vector(answer: Any) -> bool:
    return isinstance(answer, list) and bool(answer) and isinstance(answer[0], float)


def distance(told: list[float], own: list[float]) -> float:
    """The largest difference of two numbers of these vectors at length 1."""
    lengths = [sum(number * number for number in vector) ** 0.5 or 1.0 for vector in (told, own)]
    return max(abs(one / lengths[0] - other / lengths[1]) for one, other in zip(told, own, strict=True))


def _post(url: str, **body: object) -> Any:
    return httpx.post(url, json=body, timeout=60).raise_for_status().json()


def main() -> None:
    """Prints, for each passage whose client is installed, how many texts agree."""
    parser = argparse.ArgumentParser(description="Run docs/integrations.md against a server.")
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("bundles", type=Path)
    parser.add_argument("--texts", type=int, default=300)
    asked = parser.parse_args()
    texts = [line for line in asked.file.read_text(encoding="utf-8").splitlines() if line][: asked.texts]
    for section, code in passages():
        environment = asked.folder / section
        if not environment.exists():
            print(f"{section}: not installed")
            continue
        try:
            told = answers_of(environment, code, asked.url, texts, asked.bundles)
            own = own_answers(code, asked.url, texts, asked.bundles)
            if "my-reader" in code:
                told, own = answered(told, own)
            largest = f", within {max(map(distance, told, own)):.1g}" if _is_vector(own[0]) else ""
            print(f"{section}: {agreeing(told, own)} of {len(own)} agree{largest}", flush=True)
        except RuntimeError as error:
            print(f"{section}: {str(error).strip().splitlines()[-1][:300]}", flush=True)


if __name__ == "__main__":
    main()
