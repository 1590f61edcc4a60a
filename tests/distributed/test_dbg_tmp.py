import random, torch, traceback, sys, os
import torch.distributed as dist
from typing import Any
from tests.distributed import test_optional_random as R
from tests.harness.plain_backend import make_plain_group

def _go(seed, group):
    from layerzero.optional import optional_units as O
    from layerzero.step.unit import Unit
    log=[]
    def note(*a): log.append(' '.join(map(str,a)))
    orig=O.OptionalUnits._leave_place
    def leave(self, gather):
        for u in self._gathered:
            if self._open not in self._reached_by[u]:
                note('leave', gather, 'frees', u.label, 'depth', u.depth, u.state.name, 'holds', u.holds)
        return orig(self,gather)
    O.OptionalUnits._leave_place=leave
    oe=O.OptionalUnits.exit_call
    def exit_call(self, call, outputs, is_outermost):
        if not self._context.in_backward and self._open is not None:
            note('exit', call.unit.label, 'optional', call.unit.is_optional, 'reach', self._may_reach(outputs), call.unit.state.name, 'depth', call.unit.depth)
        return oe(self, call, outputs, is_outermost)
    O.OptionalUnits.exit_call=exit_call
    ob=O.OptionalUnits.before_use
    def before_use(self, unit):
        note('use', unit.label, unit.state.name, 'bwd', self._context.in_backward, 'open', self._open is not None)
        return ob(self, unit)
    O.OptionalUnits.before_use=before_use
    bf=O.OptionalUnits.before_forward
    def before_forward(self, unit, fp):
        note('--- forward of', unit.label or 'root', 'reached', {u.label: len(p) for u,p in self._reached_by.items()})
        return bf(self, unit, fp)
    O.OptionalUnits.before_forward=before_forward
    of=Unit.free
    def free(self, *a, **k):
        if self.label=='slots.1.regions.1': note('FREE', a, k, self.state.name, self.holds, [f'{f.name}:{f.lineno}' for f in traceback.extract_stack()[-8:-1]])
        return of(self,*a,**k)
    Unit.free=free
    orr=Unit.reshard
    def reshard(self, *a, **k):
        if self.label=='slots.1.regions.1': note('RESHARD', a, k, self.state.name, self.holds, [f'{f.name}:{f.lineno}' for f in traceback.extract_stack()[-8:-1]])
        return orr(self,*a,**k)
    Unit.reshard=reshard
    given = {} if group == "named" else {"process_group": make_plain_group(R.TIMEOUT)}
    try:
        R._train(seed, **given)
    except BaseException as e:
        open(f'/tmp/w/dbg/log{dist.get_rank()}','w').write('\n'.join(log[-120:])+'\n'+''.join(traceback.format_exception(e))[-3000:])
        raise
def test_dbg(ranks: Any):
    seed=int(os.environ['SEED']); n=int(os.environ['N']); g=os.environ.get('G','named')
    ranks(n, _go, seed, g, timeout=120)
