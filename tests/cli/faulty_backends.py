"""Backends with one fault each, which ``sennit check`` has to find."""

from __future__ import annotations

from sennit.backends.base import Support
from sennit.backends.reference.backend import ReferenceBackend


class Inexact(ReferenceBackend):
    """A hundredth too large."""

    def attend(self, launch):
        super().attend(launch)
        launch.out.mul_(1.01)


class Raising(ReferenceBackend):
    def attend(self, launch):
        raise RuntimeError("no such kernel")


class Choosy(ReferenceBackend):
    """Takes no latent keys."""

    def supports(self, spec, features, device):
        return Support.no("latent keys not implemented") if spec.latent else Support.yes()


class Misplacing(ReferenceBackend):
    """Writes a slot that is no new token's too."""

    def append(self, launch):
        super().append(launch)
        if launch.k_pages.numel():
            launch.k_pages[0, 0] = 7.0


class Idle(ReferenceBackend):
    """Stores nothing."""

    def append(self, launch):
        pass


class Forgetful(ReferenceBackend):
    """Does not copy pages that a fork shares before they are written to."""

    def copy_pages(self, pages, source, target):
        pages[target] = 0.0


class Absent(ReferenceBackend):
    def available(self, device):
        return Support.no("needs a GPU [red]of another kind")


INEXACT = Inexact("inexact", by_items=False)
RAISING = Raising("raising", by_items=False)
CHOOSY = Choosy("choosy", by_items=False)
MISPLACING = Misplacing("misplacing", by_items=False)
IDLE = Idle("idle", by_items=False)
FORGETFUL = Forgetful("forgetful", by_items=False)
ABSENT = Absent("absent", by_items=False)
