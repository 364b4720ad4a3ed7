"""The glossaries of the report pages: terms and their definitions in plain English."""

AUDIT = [
    ("step", "One iteration of the learner, which is one row of telemetry. All windows are measured in steps."),
    (
        "condition",
        "One perturbation (or chain of perturbations) at one magnitude and one onset. The control is the condition "
        "without any.",
    ),
    (
        "lane",
        "One seed trained under one condition. All lanes of a seed use the same random numbers, so that they can be "
        "compared in pairs.",
    ),
    ("onset", "t_s, the step at which the perturbation begins. Up to it, all lanes of a seed are identical."),
    (
        "performance",
        "J(t); higher is better. It measures what the learner has learned. For this package's learners, it is measured "
        "in undisturbed copies of the environments, or on held-out prompts, even while observations, actions or "
        "dynamics are disturbed in training. A custom learner defines its own.",
    ),
    (
        "acting performance",
        "The return during training itself, which the disturbance affects. If it drops and performance does not, the "
        "disturbance harms what the policy does at the time, but not what it has learned.",
    ),
    ("J_pre, sigma_pre", "Mean and standard deviation of J over the {window} steps before the onset."),
    (
        "T_c, collapse time",
        "The first step t from the onset on at which J(t) < J_pre - 2 sigma_pre and J stays below for {hold} steps; "
        "infinite if there is none. If fewer than {hold} steps are left, J has to stay below until the end, and the "
        "collapse is marked as censored. A J that is not finite counts as collapsed.",
    ),
    ("I_inst, instability index", "Population variance of J over the last {window} steps."),
    (
        "P_div, divergence probability",
        "Share of seeds with T_c < T_max / 2 ({half:g} here), where T_max is the run's total number of steps.",
    ),
    (
        "R_rec, recovery rate",
        "(J(t_end) - J(t_min)) / (J_pre - J(t_min)), where t_min is the step of the lowest J after the onset; 1 is "
        "full recovery. It is not defined for runs that collapse fully or whose J never falls below J_pre.",
    ),
    (
        "MSD, meta-state deviation",
        "The largest distance of a monitor's latent state from its value at the onset, over the {horizon} steps that "
        "follow.",
    ),
    (
        "RT, recovery time",
        "Steps from the onset until J is back above J_pre - 2 sigma_pre after having fallen below; -1 (no delay) if it "
        "never fell below.",
    ),
    (
        "SIP, spike intensity",
        "The peak of I_inst over the {window} steps from the onset on, relative to its level just before the onset.",
    ),
    (
        "critical magnitude",
        "The magnitude at which the share of collapsed seeds crosses one half. It does not exist if half of the "
        "controls collapse. If any control collapses, it is also computed from only the seeds whose control survives.",
    ),
    ("control survives", "The control lane of the same seed and onset does not collapse."),
    (
        "excess over control",
        "The number of seeds that collapse although their control survives, minus the number that survive although "
        "their control collapses, as a share of all seeds; with Newcombe's interval for paired proportions (1998, "
        "method 10).",
    ),
    (
        "IQM, interquartile mean",
        "Mean over the middle half of the seeds. Its 95% interval, and that of the difference to the control, is a "
        "bootstrap over seeds.",
    ),
    (
        "difference to control",
        "Final performance minus that of the control lane of the same seed, averaged over seeds by the interquartile "
        "mean.",
    ),
    (
        "x_grad",
        "Gradient coherence: mean pairwise cosine of minibatch gradients at the same parameters, before any "
        "disturbance of the gradient. It is 1 if all agree and 0 if they are unrelated.",
    ),
    (
        "x_used",
        "Cosine between the gradient as it is used and as it was before any disturbance, averaged over a step's "
        "updates; 1 if the gradient is not disturbed.",
    ),
    ("x_inst", "The instability index I_inst(t) at every step."),
    ("x_gen", "Smoothed performance."),
    ("x_mem", "Persistence of recent training state: how closely updates follow the optimizer's first moment."),
]
"""The glossary of an audit; `str.format` fills in the windows of the run."""

AUDIT_SOURCE = (
    "Metrics follow Table S5 of \u201cTraining instability in deep learning follows low-dimensional dynamical "
    "principles\u201d, with the windows of this run."
)
"""The source of the metrics in `AUDIT`."""

COMPARISON = [
    ("plain learner", "The learner without the variants' remedies and settings."),
    (
        "magnitudes survived (score)",
        "The number of tried magnitudes of a perturbation at which a seed does not collapse. These are 1/4, 1/2, 1, 2 "
        "and 4 times the magnitude at which half of the plain learner's seeds collapse, or times the one that the spec "
        "gives.",
    ),
    (
        "gain (difference of scores)",
        "The score of the variant minus that of the plain learner, paired by seed: the mean over the seeds that "
        "collapse undisturbed with neither. Its interval and p-value are those of an exact sign-flip permutation "
        "test.",
    ),
    (
        "cost (difference of performance)",
        "The undisturbed performance of the variant minus that of the plain learner at the end of the run, paired by "
        "seed.",
    ),
    (
        "acted",
        "The share of a remedy's applications, from the onset on, in which it changed its input; for a remedy that "
        "acts on updates, the share of updates. A remedy that never acted cannot have helped.",
    ),
    (
        "time per step",
        "The time of an undisturbed step divided by that of the plain learner; the two are timed alternately.",
    ),
    (
        "ratio of thresholds",
        "The magnitude at which a seed collapses with the variant, divided by that with the plain learner: the median "
        "over the seeds whose threshold lies between two tried magnitudes with both.",
    ),
    (
        "fresh seeds",
        "Among many differences, some exclude zero by chance. Those that do are measured again on other seeds, and the "
        "new p-values are adjusted for their number (Holm's method).",
    ),
    (
        "(... would)",
        "The true difference that a comparison with as many seeds and the same spread would detect with a probability "
        "of 0.8.",
    ),
]
"""The glossary of a comparison of variants."""

DETECTION = [
    ("clean run", "An undisturbed training run. Detectors are fitted to some of them and calibrated on others."),
    (
        "score",
        "A detector's output at every step of a run, computed from that step and earlier ones. A higher score is more "
        "unusual.",
    ),
    (
        "reads",
        "The channels that a detector reads: one channel, or all of them. Detectors of all channels without a model "
        "are control charts of the joint distance from the clean runs at the same step: of that step (T2), of a "
        "moving average with the given rate (MEWMA), or of the furthest channel (max |z|).",
    ),
    (
        "false alarms per clean run",
        "The share of clean runs with an alarm at any step. The threshold is calibrated on separate clean runs, so "
        "that the probability of a false alarm is at most alpha on average over such calibration sets. With a single "
        "set it varies, the more the fewer runs the set has. The table has the share that was observed.",
    ),
    ("detected", "The share of disturbed lanes with an alarm at or after the onset."),
    (
        "AUROC",
        "The probability that the largest score of a disturbed lane is above that of a clean lane tested by the same "
        "detector. 0.5 is chance and 1 is perfect. It does not depend on the threshold.",
    ),
    (
        "lead time",
        "The steps from the first alarm after the onset to the collapse: the median over the lanes that collapse. It "
        "is negative if the alarm comes after the collapse.",
    ),
    ("gain", "The monitor's value minus the detector's, on the same lanes."),
    (
        "intervals",
        "95% bootstrap intervals over seeds, because lanes of the same seed are alike. A share of seeds with one lane "
        "each, such as that of clean runs or of one condition, has a Wilson interval.",
    ),
    (
        "meta-state deviation",
        "The distance of the monitor's latent state (for control charts, of the telemetry itself) from the mean of the "
        "clean runs at the same step. It is whitened, so that clean runs have a standard deviation of 1 in every "
        "direction.",
    ),
    ("onset", "The step at which the perturbation begins."),
    (
        "fitted to other learners",
        "A monitor that is fitted to clean lanes of other learners, over the channels that all learners have, and "
        "tested on this one. If it is unchanged, it measures in the other learners' units. If it is recalibrated, only "
        "the threshold is this learner's. If only its model's parameters are kept, the channels' scales, the envelopes "
        "of clean runs at each step, and the threshold are this learner's. Runs of several learners are cut to the "
        "shortest, and later steps are compared with its last one.",
    ),
]
"""The glossary of a comparison of detectors."""

MONITORING = [
    ("clean run", "An undisturbed training run. The monitor is fitted to some of them and calibrated on others."),
    (
        "score",
        "The monitor's output at every step, computed from that step and earlier ones: the most unusual of its "
        "statistics, on a common scale. A higher score is more unusual.",
    ),
    (
        "threshold, alpha",
        "There is an alarm if the score is above the threshold. The threshold is calibrated so that another clean "
        "run has an alarm at any step with a probability of at most alpha, on average over the possible sets of "
        "calibration runs. For the set that was used, the probability varies around that value, the more the smaller "
        "the set is.",
    ),
    (
        "distance",
        "The distance of a channel from the mean of the clean runs at the same step, in their standard deviations.",
    ),
    (
        "latent",
        "The state of the monitor's model (for control charts, the standardised telemetry itself), along the two "
        "directions in which it varies most.",
    ),
    (
        "not finite, silent",
        "Alarms without a score. Not finite: a value is NaN, infinite or a text where clean runs have numbers. Silent: "
        "a channel has no value for longer than in any clean run, while other channels have values.",
    ),
    (
        "innovation",
        "The part of a value that was not predicted, by a model or by linear regression on the previous step.",
    ),
    ("surprise", "Statistic: the size of recent innovations over all channels."),
    ("burst", "Statistic: the largest innovation of a channel, given those of the other channels at the same step."),
    (
        "spread_z, spread_e, spread_h",
        "Statistic: how much larger or smaller the fluctuations of a channel are than in clean runs: those of its "
        "distance (z), of its innovation (e), or of its innovation given those of the other channels (h).",
    ),
    (
        "dynamics",
        "Statistic: how strongly innovations depend on the previous step, which happens if a channel reacts faster.",
    ),
    ("shift", "Statistic: how far all channels together have moved to one side of the model's prediction."),
    ("departure", "Statistic: the distance from the clean runs at the same step, over all channels."),
    ("outlier", "Statistic: the distance from the clean runs at the same step, of the furthest channel."),
    ("deviation", "Statistic: meta-state deviation, the whitened distance of the latent from that of the clean runs."),
    ("_0.1, _1, ...", "The rate of a statistic's moving average; with a rate of 1 there is no averaging."),
]
"""The glossary of monitored runs."""
