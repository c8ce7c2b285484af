"""`python -m cost_aware_trainer.agent`: the first process of a pod."""

import sys

from cost_aware_trainer.agent.server import main

if __name__ == "__main__":
    sys.exit(main())
