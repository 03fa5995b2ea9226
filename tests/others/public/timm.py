"""timm's `train.py`: a small ResNet on DDP, on images of noise and a colour for each class."""

from others.public.program import Program

# PyPI's torchvision is built for the torch with CUDA: its operators, which the programs do not use,
# cannot be loaded beside a torch for CPUs, and the shapes that it describes for them stop its import.
TORCHVISION = "torchvision==0.28.0"
WITHOUT_OPERATORS = (
    "sed -i '/^@torch.library.register_fake(/d' $(python -c \"from importlib.util import find_spec; "
    "print(find_spec('torchvision').submodule_search_locations[0])\")/_meta_registrations.py"
)

IMAGES = """
from pathlib import Path

import numpy
from PIL import Image

draw = numpy.random.default_rng(0)
colours = draw.integers(60, 196, (4, 3))
for split, number in (("train", 48), ("validation", 8)):
    for label, colour in enumerate(colours):
        folder = Path("images", split, f"class{label}")
        folder.mkdir(parents=True)
        for index in range(number):
            pixels = (colour + draw.normal(0, 60, (72, 72, 3))).clip(0, 255).astype("uint8")
            Image.fromarray(pixels).save(folder / f"{index}.png")
"""

PROGRAMS = {
    "timm": Program(
        repository="huggingface/pytorch-image-models",
        command="train.py --data-dir images --device cpu --model test_resnet --num-classes 4 "
        "--input-size 3 64 64 -b 8 -j 1 --epochs 4 --warmup-epochs 1 --opt adamw --lr 2e-3 --clip-grad 1 "
        "--grad-accum-steps 2 --mixup 0.2 --model-ema --model-ema-decay 0.9 --eval-metric loss "
        "--log-interval 1 --output results",
        packages=(TORCHVISION,),
        files={"make_images.py": IMAGES},
        prepare=(WITHOUT_OPERATORS, "python make_images.py"),
        changes=(  # its DDP is for GPUs alone
            ("train.py", "prepare_distributed(device_ids=[device], ", "prepare_distributed("),
        ),
        # Losses of an evaluation are printed in full beside the checkpoint's name.
        results=r"(?: Loss:\s+([\d.]+) \(\s*([\d.]+)\)|checkpoint-\d+.pth.tar', ([\d.]+)\)|"
        r"Acc@1:\s+([\d.]+) \(\s*([\d.]+)\))",
        compared="losses of 24 updates, their means, and 8 evaluations",
    ),
}
