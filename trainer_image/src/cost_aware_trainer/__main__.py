"""Program that torchrun starts on every rank: `python -m cost_aware_trainer [--plan PLAN.json] [--steps-log LOG.jsonl]`."""

import sys

from cost_aware_trainer.training.rank import main

if __name__ == "__main__":
    sys.exit(main())
