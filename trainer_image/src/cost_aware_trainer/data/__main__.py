"""`python -m cost_aware_trainer.data prepare`: writes the bundled data set."""

from cost_aware_trainer.data.token_files import main

if __name__ == "__main__":
    raise SystemExit(main())
