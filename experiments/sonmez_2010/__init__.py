"""Reproduce Sonmez, Mohamed and Epema (2010): the benefit of co-allocation and a comparison of its policies."""

from experiments.experiment import Experiment
from experiments.sonmez_2010.gains import Figure7a, Figure7b, Figure8, Table5
from experiments.sonmez_2010.policies import Figure2, Figure6, Figure9, Figure10
from experiments.sonmez_2010.readings import Figure9Steady, Figure9Times, Figure10Times, Table5Poisson
from experiments.sonmez_2010.saturation import Table4, Table4ByQueue

EXPERIMENTS: tuple[Experiment, ...] = (
    Figure2(),
    Figure6(),
    Table4(),
    Table4ByQueue(),
    Figure7a(),
    Figure7b(),
    Table5(),
    Table5Poisson(),
    Figure8(),
    Figure9(),
    Figure9Times(),
    Figure9Steady(),
    Figure10(),
    Figure10Times(),
)
