"""bertdistiller (PyPI, 0.1.2) training in turns with another process; `against_bertdistiller.py` runs it in its own environment.

Arguments: a folder with `teacher/` and `pieces.json` (token ids a text), and a JSON document of settings. For each line on standard
input it trains one step and prints the step's real tokens and seconds, including the time to make the batch.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bertdistiller.distillation.minilm.args import MiniLMTrainingArguments
from bertdistiller.distillation.minilm.modeling import create_student
from bertdistiller.distillation.minilm.trainer import MiniLMTrainer
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, TrainerCallback


class Turns(TrainerCallback):
    """Waits for a line before each step, and prints the tokens and seconds of the step."""

    def __init__(self) -> None:
        self.tokens = 0
        self.began = 0.0

    def wait(self) -> None:
        sys.stdin.readline()
        self.began = time.perf_counter()

    def on_train_begin(self, *_given: Any, **_more: Any) -> None:
        self.wait()

    def on_step_end(self, *_given: Any, **_more: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(json.dumps({"tokens": self.tokens, "seconds": time.perf_counter() - self.began}), flush=True)
        self.tokens = 0
        self.wait()


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(given["threads"])
    pieces = json.loads((folder / "pieces.json").read_text())
    rows = Dataset.from_dict({"input_ids": pieces, "attention_mask": [[1] * len(piece) for piece in pieces]})
    turns = Turns()
    padding = DataCollatorWithPadding(AutoTokenizer.from_pretrained(folder / "teacher"))

    class Counting(MiniLMTrainer):
        """Counts tokens in the training step, since batches are prefetched."""

        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            turns.tokens += int(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *more)

    args = MiniLMTrainingArguments(
        output_dir=str(folder / "peer"), max_steps=given["steps"], per_device_train_batch_size=given["batch"],
        use_cpu=given["device"] == "cpu",
        bf16=given["precision"] == "bf16", group_by_length=given["group_by_length"], learning_rate=1e-4, save_strategy="no",
        logging_steps=10_000, report_to=[], disable_tqdm=True, dataloader_num_workers=0, max_grad_norm=1.0, seed=0,
        teacher_layer=given["teacher_layer"], student_layer=given["student_layers"], student_hidden_size=given["student_width"],
        student_attention_heads=given["student_heads"], num_relation_heads=given["relation_heads"],
    )  # fmt: skip
    teacher = AutoModel.from_pretrained(folder / "teacher")
    student = create_student(str(folder / "teacher"), args, use_teacher_weights=True)
    trainer = Counting(
        model=student, teacher_model=teacher, args=args, train_dataset=rows, data_collator=padding, callbacks=[turns]
    )
    trainer.train()


if __name__ == "__main__":
    main()
