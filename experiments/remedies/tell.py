"""Prints the tables of README.md from the stored results of comparisons.

python tell.py [NAME ...]           the tables of NAME.json beside this file; of all of them by default
python tell.py --store NAME=FOLDER  copies compare.json of a finished comparison to NAME.json
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import pandas as pd

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
    if "level_difference" in bought:
        print("\nBy the plain learner's level:\n")
        print(f"| variant | {' | '.join(perturbations)} |\n|{'---|' * (1 + len(perturbations))}")
        plain = bought.drop_duplicates("perturbation").plain_level_score
        print(f"| plain: magnitudes survived | {' | '.join(f'{score:.2f}' for score in plain)} |")
        for variant, rows in bought.groupby("variant", sort=False):
            print(f"| {variant} | {' | '.join(interval(row, 'level_difference') for _, row in rows.iterrows())} |")
        for _, row in confirmed.iterrows():
            print(f"\n{row.variant} under {row.perturbation} on fresh seeds: {interval(row, 'level_difference')}")
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


def main() -> None:
    """Stores, or prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--store", action="append", default=[], metavar="NAME=FOLDER")
    asked = parser.parse_args()
    for pair in asked.store:
        name, _, folder = pair.partition("=")
        shutil.copyfile(Path(folder) / SUMMARY, HERE / f"{name}.json")
    for name in asked.names or ([] if asked.store else sorted(path.stem for path in HERE.glob("*.json"))):
        tell(name)


if __name__ == "__main__":
    main()
