"""What the library asks of a device."""

import gc
import traceback

import torch

from axonmpi.utils.device import device_at


def test_no_collection_runs_while_torch_holds_the_generators_mutex():
    """A collection there lets another thread run, which may wait for the mutex: neither thread goes on then."""
    device, within = device_at(torch.device("cpu")), []

    def note(phase: str, info: object) -> None:
        within.append([frame.name for frame in traceback.extract_stack()])

    gc.callbacks.append(note)
    try:
        for _ in range(10):
            gc.disable()
            garbage = [[] for _ in range(10 * gc.get_threshold()[0])]
            gc.enable()
            device.random_state()
            assert gc.isenabled()
            del garbage
    finally:
        gc.callbacks.remove(note)
    assert within, "nothing was collected at all"
    assert not [names for names in within if "get_rng_state" in names]
