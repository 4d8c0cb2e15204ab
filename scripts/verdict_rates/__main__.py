"""Draw stored answers with a known true loss and count the verdicts: the tables of docs/accuracy.md.

python -m scripts.verdict_rates                  # print the tables (some minutes)
python -m scripts.verdict_rates --write          # and put them into the page
python -m scripts.verdict_rates --answers STORE  # renew answers.json from the evaluations of a store
"""

import argparse
import json
from pathlib import Path

from eval.results import EvalResult
from pipelines.nightly.accuracy import pack_bits
from scripts.verdict_rates.rates import ANSWERS, FORMATS, MODEL, PAGE, tables, written


def main() -> None:
    """Print the tables, write them, or renew the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    parser.add_argument("--answers", type=Path, metavar="STORE", help="renew answers.json from this store")
    arguments = parser.parse_args()
    if arguments.answers:
        renew(arguments.answers)
        return
    text = tables()
    print(text)  # noqa: T201
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


def renew(store: Path) -> None:
    """Write the answers of a store's evaluations as bits."""
    right = {}
    for file in sorted(store.glob(f"evaluate/{MODEL}-*/evaluation.json")):
        result = EvalResult.load(file)
        if result.qformat in FORMATS and result.limit is None:
            right[result.qformat] = pack_bits([record.correct for record in result.records])
            about = {"model": MODEL, "task": result.task, "num_fewshot": result.num_fewshot, "engine": result.engine}
            questions = result.questions
    missing = sorted(set(FORMATS) - set(right))
    if missing:
        raise SystemExit(f"{store} has no evaluation of {MODEL} in {', '.join(missing)}: make sweep model={MODEL} ...")
    ANSWERS.write_text(json.dumps(about | {"questions": questions, "right": right}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
