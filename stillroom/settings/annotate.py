"""The settings of `stillroom annotate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve.bundle.runtimes import Device
from serve.options import check, group, setting
from serve.text.answers import AnswerOptions

ROWS, MACHINE, ANSWERS = "Rows", "Machine", "Answers"
MOST = 1024  # processes or threads; more would only wait for each other


@dataclass(frozen=True)
class Annotation:
    """What to annotate, and how."""

    bundle: Path
    input: Path | str = setting(
        help="A file of text: .jsonl, .json, .csv, .tsv or .parquet with `text`, or .txt; .gz too; - is stdin. Or many: a folder, a "
        "pattern such as 'in/*.parquet', or a URL (s3://, gs://, az://).",
        panel=ROWS,
    )
    output: Path | str = setting(
        help="JSON lines, one for each row, in order; - is stdout. A name that ends in .parquet is a table, in .npy an array of vectors. "
        "For many inputs: a folder or URL, which gets a file for each part.",
        panel=ROWS,
    )
    options: AnswerOptions = group(AnswerOptions, panel=ANSWERS)
    format: Literal["jsonl", "json", "csv", "tsv", "txt", "parquet"] | None = setting(
        None, help="Format of the input.", shown="what its name ends with", panel=ROWS
    )
    answer_field: str = setting(
        "answer", help="The field that holds the answer in each row of the output.", flag="--field", panel=ROWS
    )
    bad_rows: Literal["stop", "skip"] = setting(
        "stop",
        help="At a row that cannot be answered: stop before it, or write its error in place of an answer.",
        panel=ROWS,
    )
    restart: bool = setting(False, help="Start over when the output has rows already.", panel=ROWS)
    part_rows: int = setting(
        8192,
        help="Rows of a part, for many inputs. With --ray, or an output in a store, what is killed loses the part that it works on.",
        at_least=1,
        panel=ROWS,
    )
    ray: str | None = setting(
        None,
        help="Answer by Ray: local, or the address of a cluster, HOST:6379. Many inputs or one.",
        suggested=("local",),
        metavar="ADDRESS",
        shown="without",
        panel=MACHINE,
    )
    variant: str | None = setting(
        None, help="Exported file to run.", choices=("fp32", "fp16", "int8"), shown="the bundle's", panel=MACHINE
    )
    device: Device = setting(
        "cpu", help="Where the model runs; cuda is an NVIDIA GPU and needs onnxruntime-gpu.", panel=MACHINE
    )
    processes: int | None = setting(
        None,
        help="Processes that run the model side by side.",
        at_least=1,
        at_most=MOST,
        shown="as many as fit the cores; 1 on cuda",
        panel=MACHINE,
    )
    threads: int | None = setting(
        None, help="Threads of one model call, in each process.", at_least=1, at_most=MOST, shown="1", panel=MACHINE
    )
    text_column: str = setting("text", help="The field or column that holds the text.", metavar="NAME", panel=ROWS)
    text_pair_column: str = setting(
        "text_pair", help="The field or column that holds the second of two texts.", metavar="NAME", panel=ROWS
    )

    def __post_init__(self) -> None:
        check(self)
