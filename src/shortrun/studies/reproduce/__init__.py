"""Every table and figure of the paper, each from one command, with the paper's numbers beside the measured ones.

What is finished (its JSON file is there) is not done again, so everything can be stopped and continued.

* ``published``: the paper's numbers, and the models that its tables and figures are made of;
* ``place``: where results and runs go;
* ``models``: train a model and measure it;
* ``figures``: draw the figures;
* ``claims``: the paper's conclusions, and whether the measured numbers agree;
* ``report``: all of it as HTML, Markdown, CSV and pictures;
* ``run``: the command.
"""

from shortrun.studies.reproduce.published import ScaleName, Target

__all__ = ["ScaleName", "Target"]
