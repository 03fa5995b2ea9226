"""Accelerate's examples: fine-tuning with gradient accumulation, checkpoints, and local SGD.

They load models and data, too, by names of the hub: see transformers.py.
"""

from others.public.program import Program
from others.public.transformers import MAKE_TOKENIZER, METRIC, OFFLINE, PACKAGES

MAKE = (
    MAKE_TOKENIZER
    + '''
import json
import random

import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

random.seed(0)
torch.manual_seed(0)


def sentence(least, most):
    return " ".join(random.choices(WORDS, k=random.randint(least, most)))


def write(folder, config, splits):
    """Write a data set as the hub has it: a file for each split, and a page that names them."""
    lines = [f"- split: {split}\\n    path: {split}.jsonl" for split in splits]
    page = f"---\\nconfigs:\\n- config_name: {config}\\n  data_files:\\n  " + "\\n  ".join(lines) + "\\n---\\n"
    os.makedirs(folder)
    with open(f"{folder}/README.md", "w") as file:
        file.write(page)
    for split, rows in splits.items():
        with open(f"{folder}/{split}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\\n" for row in rows)


def pairs(count):
    """Yield pairs of sentences; those with the label 1 begin with the same word."""
    for index in range(count):
        first, second, label = sentence(8, 14), sentence(8, 14), index % 2
        second = first.split()[0] + " " + second if label else second
        yield {"sentence1": first, "sentence2": second, "label": label, "idx": index}


write("nyu-mll/glue", "mrpc", {"train": pairs(640), "validation": pairs(200)})
texts = {"train": 600, "validation": 64}
texts = {split: [{"text": sentence(20, 60)} for _ in range(count)] for split, count in texts.items()}
write("Salesforce/wikitext", "wikitext-2-v1", texts)

tokenizer = make_tokenizer("bert-base-cased")
sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
sizes["num_attention_heads"] = 4
BertForSequenceClassification(BertConfig(**sizes)).save_pretrained("bert-base-cased")
tokenizer = make_tokenizer("HuggingFaceTB/SmolLM-360M")
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("HuggingFaceTB/SmolLM-360M")
'''
)
_ACCURACY_AND_F1 = r"epoch \d+: \{'accuracy': ([\d.]+), 'f1': ([\d.]+)\}"
_COMMON = {
    "repository": "huggingface/accelerate",
    "packages": PACKAGES,
    "files": {"make.py": MAKE, "glue/glue.py": METRIC},
    "prepare": ("python make.py",),
    "env": OFFLINE,
}
PROGRAMS = {
    "accelerate-accumulation": Program(
        command="examples/by_feature/gradient_accumulation_for_autoregressive_models.py --cpu "
        "--gradient_accumulation_steps=4",
        results=r"grad norm: ([\d.e-]+) ::train loss: ([\d.e-]+)|perplexity: ([\d.e-]+) eval_loss: ([\d.e-]+)",
        compared="losses and norms of gradients of 96 steps, and 3 evaluations",
        **_COMMON,
    ),
    "accelerate-complete": Program(
        command="examples/complete_nlp_example.py --cpu --checkpointing_steps=epoch",
        results=_ACCURACY_AND_F1,
        compared="accuracy and F1 after each of 3 epochs",
        **_COMMON,
    ),
    "accelerate-local-sgd": Program(
        command="examples/by_feature/local_sgd.py --cpu --local_sgd_steps=4",
        results=_ACCURACY_AND_F1,
        compared="accuracy and F1 after each of 3 epochs",
        **_COMMON,
    ),
}
