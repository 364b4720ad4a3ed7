"""Statistics over seeds, each with its confidence interval."""

from jaxaudit.analysis.statistics.critical import FALLEN as FALLEN
from jaxaudit.analysis.statistics.critical import critical_beside as critical_beside
from jaxaudit.analysis.statistics.critical import critical_magnitude as critical_magnitude
from jaxaudit.analysis.statistics.critical import harm_rises as harm_rises
from jaxaudit.analysis.statistics.critical import isotonic as isotonic
from jaxaudit.analysis.statistics.intervals import Estimate as Estimate
from jaxaudit.analysis.statistics.intervals import Ranks as Ranks
from jaxaudit.analysis.statistics.intervals import bootstrap as bootstrap
from jaxaudit.analysis.statistics.intervals import collapsed as collapsed
from jaxaudit.analysis.statistics.intervals import divergence as divergence
from jaxaudit.analysis.statistics.intervals import interquartile_mean as interquartile_mean
from jaxaudit.analysis.statistics.intervals import median as median
from jaxaudit.analysis.statistics.intervals import paired_difference as paired_difference
from jaxaudit.analysis.statistics.intervals import proportion as proportion
from jaxaudit.analysis.statistics.intervals import ranks as ranks
from jaxaudit.analysis.statistics.intervals import seeds_for as seeds_for
from jaxaudit.analysis.statistics.intervals import wilson as wilson
from jaxaudit.analysis.statistics.paired import Excess as Excess
from jaxaudit.analysis.statistics.paired import excess as excess
from jaxaudit.analysis.statistics.paired import paired_proportions as paired_proportions
from jaxaudit.analysis.statistics.whitening import whitening as whitening
