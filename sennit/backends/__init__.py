"""Backends turn plans and tensors into numbers; :mod:`sennit.backends.registry` finds and chooses them."""
