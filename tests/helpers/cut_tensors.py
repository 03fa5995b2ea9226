"""Tensors that are cut into boxes in any way, and dealt out to ranks."""

import random

import torch

from axonmpi.checkpoint.files.tensor_file import TensorSpec, lay_out
from axonmpi.checkpoint.parts.boxes import Box
from axonmpi.checkpoint.parts.part import Part, Piece
from axonmpi.checkpoint.writing.job import Job
from axonmpi.checkpoint.writing.plan import places_in, share_of

SHAPES = {
    "columns": (512, 4096),
    "rows": (700, 512),
    "deep": (3, 40, 50, 60),
    "long": (1_500_000,),
    "none": (0, 4),
    "one": (),
    "small": (7, 3),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def whole_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    choice = random.Random(seed).choice
    return {
        name: torch.randint(0, 100, shape, generator=generator).to(choice(DTYPES)) for name, shape in SHAPES.items()
    }


def cut(box, count, chance):
    """Cut a box into about as many, along any dimensions."""
    boxes = [box]
    for _ in range(20 * count):
        if len(boxes) >= count:
            break
        index = max(range(len(boxes)), key=lambda at: boxes[at].numel)
        dim = chance.randrange(len(box.size)) if box.size else 0
        if not box.size or boxes[index].size[dim] < 2:
            continue
        one = boxes.pop(index)
        at = chance.randrange(1, one.size[dim])
        for first, size in ((0, at), (at, one.size[dim] - at)):
            start = (*one.start[:dim], one.start[dim] + first, *one.start[dim + 1 :])
            boxes.append(Box(start, (*one.size[:dim], size, *one.size[dim + 1 :])))
    return boxes


def memory_of(tensor, box):
    """Return the values of a box in memory of some strides."""
    values = tensor[box.slices].clone()
    if values.dim() > 1 and box.numel % 2:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    return values


def parts_of(rank, size, tensors, seed):
    """Cut each tensor into boxes, and give each box to one rank, or the tensor to all ranks."""
    chance = random.Random(seed)
    parts = []
    for name, tensor in tensors.items():
        copied = chance.random() < 0.3
        boxes = cut(Box.whole(tensor.shape), chance.randrange(1, 9), chance)
        owners = [chance.randrange(size) for _ in boxes]
        pieces = [
            Piece(box, memory_of(tensor, box))
            for box, owner in zip(boxes, owners, strict=True)
            if copied or owner == rank
        ]
        copies, copy = (size, rank) if copied else (1, 0)
        parts.append(Part(name, tuple(tensor.shape), tensor.dtype, pieces, copies, copy))
    return parts


def job_for(path, parts, max_file_size=1 << 40):
    files = {"model": lay_out("model", [TensorSpec(p.name, p.dtype, p.shape) for p in parts], {}, max_file_size)}
    places = places_in(files)
    share = share_of([(part, places["model", part.name]) for part in parts], 1, 0)
    return Job(path, files["model"], share, share.nbytes, {"state.json": b"{}"})
