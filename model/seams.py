"""The old name of model/slots.py, for plugins that import it."""

import sys

from model import slots

sys.modules[__name__] = slots
