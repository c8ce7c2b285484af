"""The trainer's fixtures: small data, small plans, real ranks, real agents."""

from tests.support.agents import script, start_agent  # noqa: F401
from tests.support.trainer_fixtures import *  # noqa: F403
