"""Many runs in one program: what they differ in."""

from __future__ import annotations

import dataclasses

from podracer.errors import UserError, unknown
from podracer.types import Agent


@dataclasses.dataclass(frozen=True)
class Members:
    """Many runs in one program. They differ in their seeds and in floats of the agent's config.

    Attributes:
      seeds: one per run.
      floats: name of a float field of the agent's config -> one value per run.
    """

    seeds: tuple[int, ...]
    floats: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seeds)

    def check(self, agent: Agent) -> None:
        """Refuse what `agent` cannot be swept over.

        Raises:
          UserError: there are no seeds, or a float is unknown, of another number than the seeds, or out of range.
        """
        if not self.seeds:
            raise UserError("members have no seeds; expected one per run.")
        if self.floats and agent.rebuild is None:
            raise UserError(f"agent {agent.name} has no `rebuild`; expected one to sweep {', '.join(self.floats)}.")
        fields = {field.name: field.type for field in dataclasses.fields(agent.config)} if self.floats else {}
        floats = [name for name, kind in fields.items() if "float" in str(kind)]
        for name, values in self.floats.items():
            if name not in floats:
                raise unknown("float", name, floats, f"Only floats of {agent.name} can be swept over.")
            if len(values) != len(self.seeds):
                raise UserError(f"{name} has {len(values)} values for {len(self.seeds)} seeds; expected one per run.")
            for value in values:
                dataclasses.replace(agent.config, **{name: value})  # checks it by its name
