"""`python -m cost_aware_trainer.agent`: a pod's first process."""

import sys

from cost_aware_trainer.agent.server import main

if __name__ == "__main__":
    sys.exit(main())
