"""What all tests need of their process: one thread, and interrupts that reach the processes that tests start."""

import signal
import threading

import pytest
import torch

from sennit.errors import BuildUnavailable
from sennit.jit import find_toolchain

# A shell starts background jobs with SIGINT ignored, and whatever they start inherits that.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small lose far more time to threads that wait for each other than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    """The tests that run a real model first: they take longest, and no other worker should wait for them at the end.

    Those that compile are skipped, with the reason, where nothing can be compiled.
    """
    items.sort(key=lambda item: item.get_closest_marker("model") is None)
    if compiling := [item for item in items if item.get_closest_marker("compiler")]:
        try:
            find_toolchain()
        except BuildUnavailable as error:
            for item in compiling:
                item.add_marker(pytest.mark.skip(reason=str(error)))
