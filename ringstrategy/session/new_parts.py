"""Notice that a module somewhere has got a parameter or a part, without looking at all of them again and again."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class NewParts:
    """Between its birth and `close`, of all modules of this process.

    Attributes:
        any: is there something new since `any_since` was last asked?
    """

    def __init__(self) -> None:
        self.any = True  # the model may have got some between set-up and now
        self._hooks = [
            register_module_parameter_registration_hook(self._notice),
            register_module_module_registration_hook(self._notice),
        ]

    def _notice(self, *_: Any) -> None:
        self.any = True

    def any_since(self) -> bool:
        """Since this was last asked."""
        found, self.any = self.any, False
        return found

    def close(self) -> None:
        """Look away."""
        for hook in self._hooks:
            hook.remove()
