"""The trainer's fixtures: small data, small plans, real ranks."""

from tests.support.trainer_fixtures import *  # noqa: F403
