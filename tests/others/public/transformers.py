"""transformers: its example run_clm.py, which trains a small GPT-2 by Trainer.

The examples of Hugging Face load tokenizers, data and metrics by names of its hub. Folders with these names have
small ones, so that not one line changes.
"""

from others.public.program import Program

PACKAGES = ("transformers", "accelerate", "datasets", "evaluate", "scikit-learn")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "cache"}
MAKE_TOKENIZER = '''
import os

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = [first + middle + last for first in "bdfgklmnprst" for middle in "aeiou" for last in "mnrst"]


def make_tokenizer(folder):
    """Save a tokenizer whose tokens are words."""
    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]", "model_max_length": 128}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(folder)
    return fast
'''
METRIC = '''
import datasets
import evaluate


class Metric(evaluate.Metric):
    """Accuracy; and F1 of answers that are 0 or 1."""

    def _info(self):
        kinds = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=kinds)

    def _compute(self, predictions, references):
        both = list(zip(predictions, references))
        found = {"accuracy": sum(a == b for a, b in both) / len(both)}
        if self.config_name == "mrpc":
            hits = sum(a == b == 1 for a, b in both)
            found["f1"] = 2 * hits / max(sum(predictions) + sum(references), 1)
        return found
'''
MAKE = (
    MAKE_TOKENIZER
    + """
import random

random.seed(0)
make_tokenizer("tokenizer")
followers = {word: random.sample(WORDS, 4) for word in WORDS}
with open("text.txt", "w") as file:
    for _ in range(2000):
        words = random.choices(WORDS)
        for _ in range(random.randint(20, 40)):
            words.append(random.choice(followers[words[-1]]))
        file.write(" ".join(words) + "\\n")
"""
)
PROGRAMS = {
    "transformers-clm": Program(
        repository="huggingface/transformers",
        command="examples/pytorch/language-modeling/run_clm.py --use_cpu --model_type=gpt2 "
        "--config_overrides=n_embd=128,n_layer=4,n_head=4,n_positions=128,vocab_size=400 "
        "--tokenizer_name=tokenizer --train_file=text.txt --block_size=64 --do_train --do_eval --max_steps=120 "
        "--per_device_train_batch_size=8 --eval_strategy=steps --eval_steps=40 --logging_steps=1 --output_dir=out "
        "--learning_rate=1e-3 --report_to=none",
        packages=PACKAGES,
        files={"make.py": MAKE, "accuracy/accuracy.py": METRIC},
        prepare=("python make.py",),
        env=OFFLINE,
        results=r"'loss': '([\d.e-]+)', 'grad_norm': '([\d.e-]+)'|'eval_loss': '([\d.e-]+)'"
        r"|eval_accuracy +=\s+([\d.]+)|perplexity +=\s+([\d.]+)",
        compared="losses and norms of gradients of 120 steps, and 4 evaluations",
    ),
}
