"""Every word, metric and channel of the report, in a few words."""

WORDS = [
    ("step", "One iteration of the learner: a row of the telemetry, and the unit of all windows."),
    ("condition", "One perturbation (or chain), magnitude and onset; the control has none."),
    (
        "lane",
        "One seed under one condition. Lanes of a seed share their randomness, so they compare in pairs.",
    ),
    (
        "onset",
        "t_s, the step at which the perturbation's window opens. Before it, every lane is the baseline.",
    ),
    (
        "performance",
        "J(t), higher is better: what the learner is worth. Where observations, actions or dynamics are disturbed this "
        "package's learners measure it in copies of the environments that nothing disturbs, and learners on dialogues "
        "on rows of held-out or fixed prompts that nothing disturbs; a learner of one's own is taken at its word.",
    ),
    (
        "acting performance",
        "How the learner fares in training itself, disturbed or not. Where it falls and J does not, the disturbance "
        "harms what the learner does, not what it has learned.",
    ),
    ("J_pre, sigma_pre", "Mean and standard deviation of J over the {window} steps before the onset."),
]
METRICS = [
    (
        "T_c",
        "collapse time",
        "First step t from the onset on with J(t) < J_pre - 2 sigma_pre that stays below for {hold} steps; "
        "never: infinity. Where fewer than {hold} steps are left it counts only if it lasts to the end, "
        "and is marked censored. Non-finite J is collapse.",
    ),
    (
        "I_inst",
        "instability index",
        "Population variance of J over the last {window} steps.",
    ),
    (
        "P_div",
        "divergence probability",
        "Share of seeds with T_c < T_max / 2 ({half:g} here), T_max being the run's total number of steps.",
    ),
    (
        "R_rec",
        "recovery rate",
        "(J(t_end) - J(t_min)) / (J_pre - J(t_min)), t_min the minimum after the onset; 1 is full recovery. "
        "Not defined for runs that fully collapse or never fall below J_pre.",
    ),
    (
        "MSD",
        "meta-state deviation",
        "Largest distance of the monitor's latent state from its value at the onset, over the {horizon} "
        "steps that follow.",
    ),
    (
        "RT",
        "recovery time",
        "Steps from the onset until J is back above J_pre - 2 sigma_pre after having left it; "
        "-1 (no delay) where it never left.",
    ),
    (
        "SIP",
        "spike intensity",
        "Peak of I_inst over the {window} steps from the onset, relative to its level just before it.",
    ),
    (
        "critical magnitude",
        "",
        "Magnitude at which the share of collapsed seeds crosses one half; there is none where half of the controls "
        "collapse. Where any does, a second one is given, of the seeds whose control does not.",
    ),
    (
        "excess over the control",
        "",
        "Of all seeds, those that collapse and whose control, undisturbed at the same onset, does not, minus those "
        "whose control alone collapses, as a share; with Newcombe's interval for paired proportions (1998, method 10).",
    ),
    (
        "IQM",
        "interquartile mean",
        "Mean over the middle half of the seeds. Its interval, and that of the paired difference, is a "
        "95% bootstrap over seeds.",
    ),
    (
        "difference to control",
        "",
        "Final performance minus that of the control lane of the same seed, then the interquartile mean.",
    ),
]
CHANNELS = [
    (
        "x_grad",
        "Gradient coherence: mean pairwise cosine of minibatch gradients at one point, before any disturbance of "
        "the gradient; 1 when all agree, 0 if unrelated.",
    ),
    (
        "x_used",
        "Cosine of the gradient as used and as it was before any disturbance, averaged over a step's updates; 1 where "
        "nothing disturbs it.",
    ),
    ("x_inst", "The instability index I_inst(t) at every step."),
    ("x_gen", "Smoothed performance."),
    ("x_mem", "Persistence of recent training state: how far updates follow the optimizer's first moment."),
]


def entries(window: int, hold: int, horizon: int, steps: int) -> list[tuple[str, str]]:
    """(term, definition) with this run's windows, in steps."""
    filled = {"window": window, "hold": hold, "horizon": horizon, "half": steps / 2}
    metrics = [(f"{term}, {name}" if name else term, text) for term, name, text in METRICS]
    return [(term, text.format(**filled)) for term, text in [*WORDS, *metrics, *CHANNELS]]
