"""What only a GPU can show, in one command: `python -m bench.gpu_check`. docs/trainer.md says what each check means."""
