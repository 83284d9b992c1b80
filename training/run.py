"""A run that trains: how it begins, and what it saves."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from core import dist
from core.plugins import joined_versions, remember
from core.rundir import RunDir
from core.schema import require
from training.config import to_yaml
from training.evaluate import find_lowest
from training.meter import Diverged, Meter
from training.progress import headline
from training.session import Session
from training.state import Facts, LowestLoss, RunState
from training.tracking import copied_from, wandb_settings
from training.updates import weights_sha256


@dataclass
class Run:
    """A run that trains. start: the iteration that it goes on from; evaluation_due: the checkpoint's, of that."""

    session: Session
    dir: RunDir
    meter: Meter
    lowest: LowestLoss
    facts: Facts
    start: int = 0
    evaluation_due: bool = False

    def save(self, line: dict[str, Any], evaluation_due: bool) -> None:
        """Write the checkpoint of an iteration. line: its metrics. Raises: Diverged where a weight is not finite;
        OSError where a file of tokens was changed; ConfigError where the ranks' weights differ."""
        self.session.data.batches.require_unchanged()
        step = line["iter"]
        if self.session.config.plugins and self.session.machine.world.size > 1:
            every = {*dist.gather(weights_sha256(self.session.model))}
            told = f"the ranks' weights differ after {step} updates, as where a plugin computes something else on each"
            require(len(every) == 1, told)
        if not all(p.isfinite().all() for p in self.session.model.parameters()):
            raise Diverged(line, "a weight is not finite")
        state = RunState(
            step, asdict(self.session.config), self.session.data.corpus.tokenizer.to_dict(), self.facts,
            evaluation_due, self.meter.readings(), self.lowest.before_step(step),  # a resume computes this step's again
        )  # fmt: skip
        self.dir.save(step, self.session.tensors(), state.to_json(), self.lowest.step == step, self.lowest.keep_step)


def begin(session: Session, run_dir: RunDir, saved: RunState | None, warnings: list[str]) -> Run:
    """Start or continue the record of the run."""
    config, facts = session.config, session.facts
    if config.fault.name != "none":  # whoever reads its losses later must see that they are wrong
        facts = replace(facts, fault=config.fault.name, start_up_warnings=warnings)
    if saved is not None:
        plugins = joined_versions(saved.facts.plugins or {}, facts.plugins or {}) or None
        commits = ", ".join(dict.fromkeys([*saved.facts.commits, *facts.commits])) or None
        facts = replace(facts, commit=commits, plugins=plugins)
    origin, wandb = copied_from(run_dir.path), wandb_settings(config, run_dir.path, facts)
    start, records, due = (saved.step, saved.records, saved.evaluation_due) if saved else (0, {}, False)
    run_dir.begin(to_yaml(config), start, wandb, records)
    resumed = f", resumed at iteration {start}" if saved else ""
    run_dir.log(f"{run_dir.path}: {headline(session)}{resumed}")
    if origin and wandb["mode"] != "disabled":
        own = f"without {run_dir.path / 'wandb'} it would get its own"
        run_dir.log(f"warning: this is a copy of {origin}, and goes on in the same run at W&B; {own}")
    if session.machine.world.rank == 0 and (warning := remember(config.plugins)):
        run_dir.log(f"warning: {warning}")
    lowest = find_lowest(run_dir, saved)
    run_dir.restore_best(lowest.step)
    meter = Meter(session, saved.readings) if saved else Meter(session)
    return Run(session, run_dir, meter, lowest, facts, start, due)
