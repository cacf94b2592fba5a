"""What all tests need of their process: one thread, and interrupts that reach the processes that tests start."""

import signal
import threading

import torch

# The tests' tensors are so small that threads only wait for each other.
torch.set_num_threads(1)

# A shell starts background jobs with SIGINT ignored, and whatever they start inherits that.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
