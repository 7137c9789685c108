"""Small language models watched while they learn: what Fig. 6 and Fig. 8 of JoMA have in common.

Networks of one depth are trained together, with every learning rate and seed that is asked of that
depth, in the published setting; `joma.experiments.fig6` and `fig8` each take the depths they show.
Here live the setting (`_groups`), the text, the training and what is measured on its way
(`_train`), the curves that were measured (`_curves`), what they say (`_summary`), their comparison
with recorded ones (`_reference`) and the pictures (`figure`).
"""

REFERENCE = (
    "folder with recorded curves, wikitext2_entropy.csv and wikitext2_val_loss.csv, to draw and "
    "compare with"
)
"""What `--reference` takes."""
