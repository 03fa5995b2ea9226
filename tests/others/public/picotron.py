"""picotron: a small Llama on 4 ranks, with two of its data, tensor, pipeline and context parallelism at a time."""

import json

from others.public.program import Program

# A model with random weights, a tokenizer of 128 words and texts of 33 words, under the names of downloaded ones.
PREPARE = """
import json
import os
import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

random.seed(0)
words = [f"w{i}" for i in range(126)]
tokens = {word: i for i, word in enumerate(["<unk>", "<s>", *words])}
tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained("tiny")
config = LlamaConfig(
    vocab_size=len(tokens),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
for folder in ("tiny", "hf_model/tiny"):
    config.save_pretrained(folder)
LlamaForCausalLM(config).save_pretrained("hf_model_safetensors")
os.makedirs("texts")
with open("texts/train.jsonl", "w") as file:
    for _ in range(2000):
        start = random.randrange(126)
        text = " ".join(words[(start + i * i) % 126] for i in range(33))
        file.write(json.dumps({"text": text}) + "\\n")
"""
SYNCHRONIZE = "torch.cuda.synchronize()"


def program(engine: str = "1f1b", **sizes: int) -> Program:
    """Return picotron with these sizes of its parallelisms (`dp`, `tp`, `pp` and `cp`)."""
    distributed = {f"{name}_size": sizes.get(name, 1) for name in ("dp", "tp", "pp", "cp")}
    config = {
        "distributed": {**distributed, "pp_engine": engine, "backend": "gloo", "use_cpu": True},
        "model": {"name": "tiny", "dtype": "float32", "use_flash_attention": False, "use_fused_adam": False},
        "training": {
            "seed": 42,
            "learning_rate": 3e-3,
            "total_train_steps": 30,
            "seq_length": 32,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_tokens": None,
        },
        "dataset": {"name": "texts", "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_dir": "ckpt", "save_frequency": 300, "load_path": ""},
        "logging": {"use_wandb": False},
        "environment": {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "FLASH_ATTEN": "0",
            "HF_TOKEN": "none",
        },
    }
    return Program(
        repository="huggingface/picotron",
        command="train.py --config config.json",
        files={"prepare.py": PREPARE, "config.json": json.dumps(config)},
        prepare=("python prepare.py",),
        packages=("datasets", "wandb"),
        changes=(
            # on a CPU: flash_attn is not there, and these are not inside a condition
            ("picotron/model.py", "from flash_attn.flash_attn_interface import flash_attn_func\n", ""),
            ("picotron/model.py", "from flash_attn.layers.rotary import apply_rotary_emb\n", ""),
            ("picotron/model.py", "from flash_attn.ops.triton.layer_norm import layer_norm_fn\n", ""),
            (
                "picotron/utils.py",
                "torch.tensor(local_num_params, device='cuda')",
                "torch.tensor(local_num_params)",
            ),
            ("picotron/pipeline_parallel/pp_communications.py", SYNCHRONIZE, "pass"),
            ("picotron/context_parallel/cp_communications.py", SYNCHRONIZE, "pass"),
            # with transformers 5: new names
            ("picotron/model.py", "config.rope_theta", 'config.rope_parameters["rope_theta"]'),
            ("picotron/data.py", "tokenizer.batch_encode_plus(", "tokenizer("),
        ),
        results=r"Loss: +(\d+\.\d+)",
        compared="losses of 30 steps",
        ranks=4,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": "huggingface"},
    )


PROGRAMS = {
    "picotron-dp-tp": program(dp=2, tp=2),
    "picotron-dp-pp": program(dp=2, pp=2),
    "picotron-tp-pp": program(tp=2, pp=2, engine="afab"),
    "picotron-tp-cp": program(tp=2, cp=2),
}
