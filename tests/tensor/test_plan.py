"""Plans: short forms of styles, and which modules patterns name."""

from functools import partial

from helpers.compare import refused
from torch import nn

from axonmpi.tensor.plan import (
    Assign,
    Column,
    Divide,
    Dropout,
    HeadDropout,
    Join,
    Region,
    Row,
    SequenceNorm,
    Split,
    Summed,
    Tied,
    Vocabulary,
    find_modules,
    read_style,
)

SHORT_FORMS = {
    "column": Column(),
    "column:3": Column(parts=3),
    "column:gather": Column(gather_output=True),
    "column:heads=4": Column(heads=4),
    "column:3,heads=4": Column(parts=3, heads=4),
    "column:heads=2,shared": Column(heads=2, shared=True),
    "row": Row(),
    "vocab": Vocabulary(),
    "vocab:parallel": Vocabulary(gather_output=False),
    "sequence": SequenceNorm(),
    "sum": Summed(),
    "dropout": Dropout(),
    "dropout:whole": Dropout(whole=True),
    "region": Region(),
    "region:shared": Region(shared=True),
    "split": Split(),
    "join": Join(),
    "tied": Tied(),
    "head_dropout:12": HeadDropout(12),
    "divide:num_heads,width": Divide(("num_heads", "width")),
    "divide_shared:num_kv_heads": Divide(("num_kv_heads",), shared=True),
}


def test_short_forms_are_read():
    for text, style in SHORT_FORMS.items():
        assert read_style(text) == style
        assert read_style(style) is style


NO_STYLES = {
    "colum": "expected one of the styles column, row, vocab, .*got 'colum'",
    "": "expected one of the styles",
    "column:0": "'column:0': expected a number of at least 1, got '0'",
    "column:three": "expected a number of at least 1, got 'three'",
    "column:heads=x": "expected a number of at least 1, got 'x'",
    "row:2": "expected nothing after the colon, got '2'",
    "vocab:gather": "expected nothing or 'parallel' after the colon, got 'gather'",
    "dropout:all": "expected nothing or 'whole'",
    "head_dropout": "expected the number of heads",
    "head_dropout:1,2": "expected the number of heads",
    "divide": "expected names of attributes",
    "divide:2": "expected names of attributes",
}


def test_what_is_no_style_is_an_error():
    refused(ValueError, *((partial(read_style, text), message) for text, message in NO_STYLES.items()))
    refused(TypeError, (partial(read_style, 3), "expected a style or its short form such as 'column', got 3"))


def model() -> nn.Module:
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))
    # a module with two names
    return nn.ModuleDict({"embed": nn.Embedding(4, 4), "blocks": blocks, "again": blocks[1]["up"]})


def test_patterns_name_modules_in_the_order_of_the_model_and_each_once():
    several = [
        ("embed", (Vocabulary(),)),
        ("blocks.0.up", (Column(), Region())),
        ("blocks.0.down", (Region(),)),
        ("blocks.1.up", (Column(),)),
    ]
    for plan, expected in (
        ({"*.up": "column", "blocks.0.*": ["region"], "embed": Vocabulary()}, several),
        ({}, []),
        # whichever of its names is used
        ({"again": "column"}, [("blocks.1.up", (Column(),))]),
        ({"again": "column", "*.1.up": [Column(), Assign("x", 1)]}, [("blocks.1.up", (Column(), Assign("x", 1)))]),
    ):
        assert list(find_modules(plan, model()).items()) == expected


def test_all_mistakes_of_a_plan_are_told_at_once():
    plan = {"blocks.*.upp": "column", "embed": "vocap", "*.down": "row", "head": "row"}
    lines = (
        r"^plan\['blocks\.\*\.upp'\]: no submodule has such a name; near it are blocks\..*blocks\.0\.up.*",
        r"plan\['embed'\]: expected one of the styles.*",
        r"plan\['head'\]: no submodule has such a name.*$",
    )
    refused(ValueError, (partial(find_modules, plan, model()), r"\n".join(lines)))


def test_what_is_no_plan_is_an_error():
    no_mapping = "plan: expected a mapping of name patterns to styles, got"
    refused(
        TypeError,
        (partial(find_modules, [("embed", "vocab")], model()), no_mapping),
        (partial(find_modules, 3, model()), no_mapping),
        (partial(find_modules, nn.Linear(2, 2), model()), no_mapping),
        (partial(find_modules, {3: "row"}, model()), "name patterns as keys, got 3"),
        (partial(find_modules, {"embed": [3]}, model()), r"plan\['embed'\]: .*got 3"),
    )
    refused(ValueError, (partial(find_modules, {"x": "row"}, nn.Linear(2, 2)), "the model has none"))
