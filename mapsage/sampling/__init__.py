"""Dynamic sampling: full batches of valid samples on every rank, in any training loop.

Its modules need torch and NumPy only. Where the MM packages are installed, importing it costs the
seconds of ``import mapsage``, which registers the rest of MapSage with them.

`dynamic_sampler.py` is the class to start with, `sampler.py` the loop that all ranks run.
"""

from .default_channel import default_channel
from .dynamic_sampler import DynamicSampler
from .exchange import SampleMismatchError, Traffic, exchange
from .lockstep import LockstepError
from .plan import ExchangePlan, Move, plan_exchange
from .pool import Candidate, SurplusPool
from .sampler import BlockSampler, OtherRankError
from .scorer import BatchShare, Scorer, as_scorer
from .scores import TileHistory, WeightedRewards
from .settings import SamplingSettings
from .shortfall import POLICIES, Decision, PassRate, ShortfallError, decide_shortfall
from .statistics import StepStatistics, Totals
from .step import EndOfData, SampledBatch
from .validity import Scores, ScoreWindow, Validity, Verdict

__all__ = [
    'BatchShare',
    'BlockSampler',
    'Candidate',
    'Decision',
    'DynamicSampler',
    'EndOfData',
    'ExchangePlan',
    'LockstepError',
    'Move',
    'OtherRankError',
    'POLICIES',
    'PassRate',
    'SampleMismatchError',
    'SampledBatch',
    'SamplingSettings',
    'ScoreWindow',
    'Scorer',
    'Scores',
    'ShortfallError',
    'StepStatistics',
    'SurplusPool',
    'TileHistory',
    'Totals',
    'Traffic',
    'Validity',
    'Verdict',
    'WeightedRewards',
    'as_scorer',
    'decide_shortfall',
    'default_channel',
    'exchange',
    'plan_exchange',
]
