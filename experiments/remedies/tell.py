"""Prints the tables of README.md from the stored results of comparisons.

python tell.py [NAME ...]           the tables of NAME.json beside this file; of all of them by default
python tell.py --store NAME=FOLDER  copies compare.json of a finished comparison to NAME.json
python tell.py --level FOLDER       scores a finished comparison again, with one level of performance for all variants
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import pandas as pd

from jaxaudit.analysis.statistics.paired import sign_flips
from jaxaudit.runs.variants.folder import SUMMARY

HERE = Path(__file__).resolve().parent


def interval(row: pd.Series, name: str, digits: int = 2) -> str:
    """A figure with its interval."""
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    if math.isnan(low):
        return f"{value:+.{digits}f} (too few seeds for an interval)"
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def bought_cell(row: pd.Series, confirmed: pd.DataFrame) -> str:
    """The difference of scores with its interval; bold, with the fresh seeds' difference, where it was confirmed."""
    text = interval(row, "difference")
    if not len(confirmed):
        return text
    again = confirmed[(confirmed.variant == row.variant) & (confirmed.perturbation == row.perturbation)]
    if not len(again):
        return text
    one = again.iloc[0]
    if one.confirmed and (one.difference > 0) == (row.difference > 0):
        return f"**{text}**; fresh {one.difference:+.2f}"
    return f"{text}; fresh {one.difference:+.2f}, not confirmed"


def tell(name: str) -> None:
    """Prints one comparison."""
    stored = json.loads((HERE / f"{name}.json").read_text())
    bought, confirmed, paid, acted = (
        pd.DataFrame(stored[table]).replace({None: math.nan}) for table in ("bought", "confirmed", "paid", "acted")
    )
    perturbations = list(dict.fromkeys(bought.perturbation))
    print(f"\n### {name}\n")
    print(f"| variant | {' | '.join(perturbations)} | undisturbed performance | time per step |")
    print("|" + "---|" * (len(perturbations) + 3))
    plain = bought.drop_duplicates("perturbation").plain_score
    print(f"| plain: magnitudes survived | {' | '.join(f'{score:.2f}' for score in plain)} | | |")
    for variant in dict.fromkeys(bought.variant):
        rows = bought[bought.variant == variant]
        cost = paid[paid.variant == variant].iloc[0]
        cells = [bought_cell(row, confirmed) for _, row in rows.iterrows()]
        fallen = int(rows.fallen.max())
        falls = f"; {fallen} fall undisturbed" if fallen else ""
        time = "-" if math.isnan(cost.step_time) else f"{cost.step_time:.2f}"
        print(f"| {variant} | {' | '.join(cells)} | {interval(cost, 'performance_difference', 3)}{falls} | {time} |")
    for ladder in stored["tried"]:
        magnitudes = ", ".join(f"{magnitude:.3g}" for magnitude in ladder["magnitudes"])
        print(f"\n{ladder['perturbation']} from step {ladder['onset']}: {magnitudes}; centre: {ladder['centre']}")
    sometimes = acted[(acted.acted < 1) | (acted.acted_undisturbed < 1)]
    conditional = acted[acted.variant.isin(set(sometimes.variant))]
    if len(conditional):
        print(f"\n| acted, % of its applications | {' | '.join(perturbations)} | undisturbed |")
        print("|" + "---|" * (len(perturbations) + 2))
        for (variant, remedy), rows in conditional.groupby(["variant", "remedy"], sort=False):
            shares = rows.set_index("perturbation").acted.reindex(perturbations)
            cells = " | ".join("-" if math.isnan(x) else f"{100 * x:.1f}" for x in shares)
            print(f"| {variant} (`{remedy}`) | {cells} | {100 * rows.acted_undisturbed.iloc[0]:.1f} |")


def level_table(runs: Path) -> None:
    """Prints gains if a lane survives where its final performance is in the plain learner's band of the same seed.

    A variant that performs worse or less steadily before the onset has a lower band of its own to fall from, so that it
    "survives" without being any better. The plain learner's band, two standard deviations below its mean before the
    onset, is the same for all.
    """
    lanes = {folder.name: pd.read_csv(folder / "metrics.csv") for folder in sorted(runs.iterdir())}
    control = lanes["plain"][lanes["plain"].condition == "control"].set_index("seed")
    level = control.performance_before - 2 * control.performance_std_before
    survived = {}
    for name, rows in lanes.items():
        rows = rows[rows.condition != "control"]
        survives = rows.final_performance.fillna(-math.inf) >= rows.seed.map(level)
        survived[name] = survives.groupby([rows.perturbation, rows.seed]).sum().unstack("perturbation")
    plain = survived.pop("plain")
    print(f"| variant | {' | '.join(plain.columns)} |\n|{'---|' * (1 + len(plain.columns))}")
    print(f"| plain: magnitudes survived | {' | '.join(f'{x:.2f}' for x in plain.mean())} |")
    for name, scores in survived.items():
        cells = []
        for perturbation in plain.columns:
            gain = sign_flips((scores[perturbation] - plain[perturbation]).to_numpy(float))
            cells.append(f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Stores, or prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--store", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--level", action="append", default=[], metavar="FOLDER")
    asked = parser.parse_args()
    for comparison in asked.level:
        for part in ("variants", "confirmation"):
            if (runs := Path(comparison) / part).exists():
                print(f"\n{part}\n")
                level_table(runs)
    for pair in asked.store:
        name, _, folder = pair.partition("=")
        shutil.copyfile(Path(folder) / SUMMARY, HERE / f"{name}.json")
    for name in asked.names or (
        [] if asked.store or asked.level else sorted(path.stem for path in HERE.glob("*.json"))
    ):
        tell(name)


if __name__ == "__main__":
    main()
