"""Texts of the Find tab for repositories, quantisations and downloads."""

from __future__ import annotations

from engine.base.language import tr
from engine.base.units import format_bytes, format_count, format_duration
from engine.library.downloads.job import JobState, JobView
from engine.library.hub.addresses import HubAddress
from engine.library.hub.card import ModelCard
from engine.library.hub.fit import FitVerdict, QuantisationFit, RepoFit
from engine.library.hub.listing import HubModel, Quantisation, RepoListing
from engine.planning.speed.texts import predicted_rate_text
from widgets.library.entry_texts import parameter_text
from widgets.library.find_values import FoundRepo, JobRow, OfferedRow, ShownCard, ShownRepo

_VERDICTS = {
    FitVerdict.CARDS: (tr("fits without the CPU"), "good"),
    FitVerdict.PARTLY: (tr("partly on the CPU"), "experts"),
    FitVerdict.CPU: (tr("fits in memory"), "good"),
    FitVerdict.NOT: (tr("does not fit"), "bad"),
    FitVerdict.UNKNOWN: (tr("unknown"), "dim"),
}


def found_repo(model: HubModel) -> FoundRepo:
    """Return a search result as a row of the Find tab."""
    parts = (
        model.architecture,
        model.licence,
        tr("gated") if model.gated else "",
        tr("{likes} likes", likes=format_count(model.likes)),
    )
    return FoundRepo(
        model.repo,
        parameter_text(model.n_parameters),
        format_count(model.downloads),
        model.updated,
        ", ".join(part for part in parts if part),
    )


def shown_repo(listing: RepoListing, fit: RepoFit | None, address: HubAddress, why: str) -> ShownRepo:
    """Return the quantisations of the repository `listing` as rows of the Find tab. One row is marked as proposed.

    The marked row is the quantisation or file that `address` names, or else the best one according to the forecast.
    `fit`: forecasts of the quantisations; None if there are none. `why`: note below the rows.
    """
    fits = {} if fit is None else {each.quantisation.name: each for each in fit.fits}
    best = None if fit is None else fit.best
    if address.quantisation is not None or address.path is not None:
        best = listing.find(address.quantisation, address.path).name
    rows = tuple(_row(each, fits.get(each.name), is_best=each.name == best) for each in listing.quantisations)
    return ShownRepo(listing.repo, why, rows)


def shown_card(repo: str, card: ModelCard | None, endpoint: str) -> ShownCard:
    """Return the model card of the repository `repo` for the Find tab.

    `card`: None if the repository has no model card; a note then says so.
    `endpoint`: address of the hub, for a link to the page of the repository.
    """
    page = f"{endpoint}/{repo}"
    if card is None:
        return ShownCard(repo, (), "", tr("This repository has no model card."))
    note = tr("The model card is truncated here. Read all of it at {page}.", page=page) if card.is_cut else ""
    return ShownCard(
        repo, card.facts, card.text, note or ("" if card.text.strip() else tr("The model card has no text."))
    )


def _row(each: Quantisation, fit: QuantisationFit | None, *, is_best: bool) -> OfferedRow:
    words, colour = ("", "dim") if fit is None else _VERDICTS[fit.verdict]
    if fit is not None and fit.verdict is FitVerdict.PARTLY and fit.n_layers_on_cpu:
        words = tr(
            "{n_layers_on_cpu} of {n_layers} layers on the CPU",
            n_layers_on_cpu=fit.n_layers_on_cpu,
            n_layers=fit.n_layers,
        )
    speed = "" if fit is None or not fit.fits else _speed(fit)
    sentence = "" if fit is None else fit.sentence
    return OfferedRow(each.name, each.label, format_bytes(each.size_bytes), words, colour, speed, sentence, is_best)


def _speed(fit: QuantisationFit) -> str:
    """Return the expected tokens per second as text for a row of the Find tab; empty if unknown."""
    if not fit.expected_per_second:
        return ""
    rate = predicted_rate_text(fit.expected_per_second)
    return tr("roughly {rate}", rate=rate) if fit.speed_source == "guess" else tr("about {rate}", rate=rate)


def job_row(job: JobView) -> JobRow:
    """Return a download as a row of the download list."""
    is_running = job.state is JobState.RUNNING
    fraction = None if not job.size_bytes else min(1.0, job.done_bytes / job.size_bytes)
    return JobRow(
        job.id,
        job.title,
        _job_text(job),
        # None is shown as a moving bar, which only a running download may have.
        fraction if fraction is not None or is_running else 0.0,
        is_bad=bool(job.reason) and job.retry_s is None,
        may_pause=job.state in (JobState.WAITING, JobState.RUNNING) or job.retry_s is not None,
        may_resume=job.state in (JobState.PAUSED, JobState.FAILED),
        must_restart=job.state is JobState.CHANGED,
        is_done=job.state is JobState.DONE,
    )


def _job_text(job: JobView) -> str:
    of = "" if job.size_bytes is None else tr(" of {size}", size=format_bytes(job.size_bytes))
    amount = f"{format_bytes(job.done_bytes)}{of}"
    match job.state:
        case JobState.DONE:
            return tr("{done}, checked and saved", done=format_bytes(job.done_bytes))
        case JobState.WAITING:
            return tr("{amount}, queued", amount=amount)
        case JobState.RUNNING:
            return _running_text(job, amount)
    if job.retry_s is not None:
        return tr(
            "{reason} The download is tried again in {time}. “Resume” tries the download again now.",
            reason=job.reason,
            time=format_duration(job.retry_s),
        )
    return job.reason or tr("{amount}, paused", amount=amount)


def _running_text(job: JobView, amount: str) -> str:
    if job.note:
        return f"{amount}, {job.note}"
    if job.stage == "verify":
        return tr("checking: {amount}", amount=amount)
    rate = "" if job.rate_bytes_per_second is None else f", {format_bytes(round(job.rate_bytes_per_second))}/s"
    return f"{amount}{rate}{'' if job.left_s is None else tr(', {time} left', time=format_duration(job.left_s))}"
