"""What report and model card say of recovery training, and its picture."""

from types import SimpleNamespace

import pytest

from pipelines.report.checkpoints import recovery_terms, sections

FACTS = {
    "method": "distill",
    "steps": 250,
    "best_step": 150,
    "loss_before": 0.839023,
    "loss_after": 0.033617,
    "tokens": 117760,
    "sequences": 460,
    "losses": [[10, 0.6], [20, 0.3]],
    "held_out_losses": [[0, 0.839023], [50, 0.0707], [150, 0.033617]],
}


def test_terms_name_steps_text_and_losses():
    terms = dict(recovery_terms(FACTS))
    assert terms["Training"] == "distill, 250 steps; the weights of step 150 are kept"
    assert terms["Text"] == "117,760 tokens in 460 sequences"
    assert terms["Loss on held-out text"] == (
        "0.839 before, 0.03362 after (KL divergence from the teacher, in nats per token)"
    )
    assert "Zeros after training" not in terms
    sparse = dict(recovery_terms(FACTS | {"sparse": {"zero_fraction": 0.5}}))
    assert sparse["Zeros after training"] == "50.0 % of the linears"
    low = dict(recovery_terms(FACTS | {"lora": {"rank": 16, "alpha": 32.0, "targets": ["q_proj", "v_proj"]}}))
    assert low["Trained"] == "matrices of rank 16 beside q_proj, v_proj"
    assert "Trained" not in terms
    assert recovery_terms({}) == ()


@pytest.mark.pictures
def test_the_picture_has_plain_numbers_and_a_description():
    """Failed before: its ticks were matplotlib's markup for powers of ten."""
    trained = {"recover": SimpleNamespace(facts=FACTS)}
    item = SimpleNamespace(model="m", variant="v", label="m v", artifact=trained.get)
    *_, shown = sections(SimpleNamespace(formats=[item]))
    figure = shown.blocks[1]
    assert figure.alt == "Held-out loss: 0.839 at step 0, 0.0707 at step 50, 0.0336 at step 150."
    assert "mathdefault" not in figure.svg
