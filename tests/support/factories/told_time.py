"""Time on a device that passes when a test says so."""

from cost_aware_trainer.telemetry.device_time import DeviceTime


class ToldTime(DeviceTime):
    now = 0.0

    def mark(self):
        return self.now
