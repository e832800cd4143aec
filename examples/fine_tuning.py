"""Fine-tune an optimized model with transformers' Trainer, save it, and load it as a plain transformers model.

    python examples/fine_tuning.py

The optimized model has the class, the parameters and the state_dict of the original, so training code and checkpoints do not
change. The data is a toy language: every token is followed by its successor.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hexa_fx
from hexa_fx.integrations.tiny_models import tiny_model

VOCABULARY = 128


class Counting(torch.utils.data.Dataset):
    """Sequences s, s+1, s+2, ... modulo the vocabulary."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (7 * index + torch.arange(16)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    model, inputs = tiny_model("mixtral")
    hexa_fx.optimize_(model, inputs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=40,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Counting())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("loss:", ", ".join(f"{loss:.2f}" for loss in losses))
        assert losses[-1] < 0.5 * losses[0]
        print(model.report)  # what was rewritten, and what the forty steps ran

        model.save_pretrained(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()  # no trace of hexa_fx in the checkpoint
        ids = Counting()[3]["input_ids"][None]
        with torch.no_grad():
            difference = (plain(ids).logits - model.eval().cpu()(ids).logits).abs().max()
        print(f"saved and loaded by plain transformers: logits differ by {difference:.1e}")
        assert difference < 1e-4


if __name__ == "__main__":
    main()
