"""Pictures and sound for the editing environment, with ffmpeg: clips of generated shots, frames for a vision model, previews of edits.

A generated shot becomes a small clip that shows its facts: the colour is the tone, a box crosses the picture as fast as the motion, the picture goes dark at
the end of a shot that ends dark, and a tone plays at the shot's loudness. A user's own clips are used as they are. Everything is kept under one folder and made
once; files appear whole (written beside, then renamed), so episodes side by side can share the folder.

ffmpeg (with libx264 and aac) is a system program: apt-get install ffmpeg.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.envs import EnvironmentFailed
from common.envs.editing_films import inside
from common.envs.editing_judges import join_of, sound_of, span_of

WIDTH, HEIGHT, FPS, RATE = 160, 90, 12, 24_000  # of clips and previews: pixels, frames a second, audio samples a second
SINE_LUFS = -21.1  # loudness of ffmpeg's sine source, whose amplitude is 1/8
COLOURS = {"calm": "0x3366AA", "tense": "0xAA2222", "sad": "0x334455", "warm": "0xCC7722", "bleak": "0x777777", "merry": "0xDDCC33"}
SPEED = {"still": 0, "slow": 12, "fast": 60}  # pixels a second of the box
LIMIT = 120  # seconds for one call of ffmpeg


class EditingError(EnvironmentFailed):
    """ffmpeg is missing, cannot do what is needed, or failed on a file. The text says which and what to do."""


def find_ffmpeg(ffmpeg: str = "ffmpeg") -> str:
    """Path of a working ffmpeg. Raises EditingError."""
    path = shutil.which(ffmpeg)
    if path is None:
        raise EditingError(f"{ffmpeg} was not found: apt-get install ffmpeg (or brew install ffmpeg), or leave out --render: tasks then work on text alone")
    return path


def run(ffmpeg: str, arguments: list[str], out: Path) -> Path:
    """Runs ffmpeg with its output written to a temporary file beside ``out`` and renamed. Raises EditingError with ffmpeg's last lines."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=out.suffix, dir=out.parent)
    os.close(handle)
    try:
        command = [ffmpeg, "-nostdin", "-hide_banner", "-loglevel", "error", "-y", *arguments, name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EditingError(f"ffmpeg for {out.name}: {type(error).__name__}: {str(error)[:200]}") from None
        if done.returncode or not os.path.getsize(name):
            raise EditingError(f"ffmpeg could not make {out.name}: {done.stderr.strip()[-400:] or 'no output'}")
        os.replace(name, out)
    finally:
        Path(name).unlink(missing_ok=True)
    return out


def _once(path: Path, make: Callable[[Path], object]) -> Path:
    if not path.exists():
        make(path)
    return path


# -------------------------------------------------------------------------------------------------------------- clips

CODECS = ["-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p", "-c:a", "aac", "-ar", str(RATE), "-ac", "1"]


def make_clip(shot: dict[str, Any], path: Path, ffmpeg: str = "ffmpeg") -> Path:
    """A clip with the facts of a shot; its length is the shot's duration (to a frame)."""
    seconds, mark = shot["duration"], hashlib.sha256(shot["id"].encode()).hexdigest()
    colour = COLOURS.get(shot.get("tone", ""), f"0x{mark[6:12]}")
    size = f"s={WIDTH}x{HEIGHT}:r={FPS}:d={seconds:g}"
    dark = f",fade=t=out:st={max(0.0, seconds - 0.5):g}:d=0.5" if shot.get("ends") == "dark" else ""
    pitch = 220 + int(mark[:2], 16) * 2
    graph = (
        f"color=c={colour}:{size}[back];color=c=0x{mark[:6]}:s=24x24:r={FPS}:d={seconds:g}[box];"
        f"[back][box]overlay=x='mod(40+{SPEED.get(shot.get('motion', ''), 0)}*t,{WIDTH})':y=33:shortest=1{dark}[v];"
        f"sine=frequency={pitch}:sample_rate={RATE}:duration={seconds:g},volume={shot['loudness'] - SINE_LUFS:g}dB[a]"
    )
    return run(ffmpeg, ["-filter_complex", graph, "-map", "[v]", "-map", "[a]", *CODECS, "-t", f"{seconds:g}"], path)


def make_clips(film: dict[str, Any], folder: str | Path, ffmpeg: str = "ffmpeg") -> dict[str, Any]:
    """Clips of all shots of a film under folder/clips; returns the film with ``media`` paths filled in. Raises EditingError without ffmpeg."""
    ffmpeg = find_ffmpeg(ffmpeg)
    film = json.loads(json.dumps(film))
    for block in film["blocks"]:
        for shot in block["shots"]:
            shot["media"] = f"clips/{block['id']}-{shot['id']}.mp4"
            _once(Path(folder) / shot["media"], lambda path, shot=shot: make_clip(shot, path, ffmpeg))
    return film


def clip(task: dict[str, Any], key: str, folder: Path, ffmpeg: str) -> Path:
    """The file of a shot: the film's own media, else a clip made of the shot's facts under ``folder``."""
    shot = task["material"][key]
    if task.get("media") and "media" in shot:
        path = Path(task["media"]) / shot["media"]
        if not inside(shot["media"]) or not path.is_file():
            raise EditingError(f"film {task['film']}, shot {key}: no file {path}")
        return path
    name = hashlib.sha256(json.dumps(shot, sort_keys=True).encode()).hexdigest()[:24]
    return _once(folder / "clips" / f"{name}.mp4", lambda path: make_clip(shot, path, ffmpeg))


def frames(video: Path, count: int, folder: Path, ffmpeg: str = "ffmpeg") -> list[Path]:
    """``count`` PNG frames spread evenly over a video, made once for a file."""
    stat = video.stat()
    name = hashlib.sha256(f"{video.resolve()} {stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()[:24]
    seconds = duration(video, ffmpeg)
    result = []
    for i in range(count):
        at = seconds * (i + 0.5) / count

        def make(path: Path, at: float = at) -> None:
            run(ffmpeg, ["-ss", f"{at:.3f}", "-i", str(video), "-frames:v", "1", "-vf", "scale='min(512,iw)':-2"], path)

        result.append(_once(folder / f"{name}-{count}-{i}.png", make))
    return result


def _probe(video: Path, ffmpeg: str) -> str:
    try:
        return subprocess.run([ffmpeg, "-nostdin", "-hide_banner", "-i", str(video)], capture_output=True, text=True, errors="replace", timeout=LIMIT).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EditingError(f"ffmpeg cannot look at {video}: {type(error).__name__}") from None


def duration(video: Path, ffmpeg: str = "ffmpeg") -> float:
    """Seconds. Raises EditingError for a file that is no video."""
    words = _probe(video, ffmpeg).partition("Duration: ")[2].partition(",")[0].split(":")
    try:
        hours, minutes, seconds = map(float, words)
    except ValueError:
        raise EditingError(f"{video}: ffmpeg finds no video of known length in it") from None
    return 3600 * hours + 60 * minutes + seconds


# ----------------------------------------------------------------------------------------------------------- previews


def timeline(task: dict[str, Any], edit: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(shot, in, out) of what an edit plays, in order, in seconds; empty for an edit without shots."""
    if task["family"] in ("CS", "NS"):
        [keys] = edit.values()
        return [(key, 0.0, float(task["material"][key]["duration"])) for key in keys if key is not None]
    if task["family"] == "RC":
        return [(key, *span_of(task, edit, key)) for key in task["shots"]]
    return [(key, *map(float, task["spans"][key])) for key in task["shots"]]


def graph(task: dict[str, Any], edit: dict[str, Any], plays: list[tuple[str, float, float]], sounding: list[bool]) -> str:
    """ffmpeg's filter graph for a timeline whose i-th input is the i-th shot's file; gives [v] and [a].

    Joins never move the picture: a fade takes half its seconds from each side, a dissolve runs over the incoming shot with the outgoing one's last frame.
    L- and J-cuts move the change of sound to after and before the cut; a bridge lets both sounds overlap on either side.
    """
    fine = task["family"] == "FC"
    joins = [join_of(edit, key) if fine and i < len(plays) - 1 else ("cut", 0.0) for i, (key, *_) in enumerate(plays)]
    lines, starts, at = [], [], 0.0
    for i, (_, start, stop) in enumerate(plays):
        starts.append(at)
        length = stop - start
        chain = f"[{i}:v]trim={start:g}:{stop:g},setpts=PTS-STARTPTS,scale={WIDTH}:{HEIGHT}:force_original_aspect_ratio=decrease"
        chain += f",pad={WIDTH}:{HEIGHT}:-1:-1,setsar=1,fps={FPS},format=yuv420p"
        if i and joins[i - 1][0] == "fade":
            chain += f",fade=t=in:st=0:d={min(joins[i - 1][1], length) / 2:g}"
        if joins[i][0] == "fade":
            half = min(joins[i][1], length) / 2
            chain += f",fade=t=out:st={length - half:g}:d={half:g}"
        if joins[i][0] == "dissolve":
            chain += f",tpad=stop_mode=clone:stop_duration={joins[i][1]:g}"
        lines.append(f"{chain},settb=1/{FPS}[v{i}]")
        at += length
    picture = "[v0]"
    for i in range(1, len(plays)):
        kind, seconds = joins[i - 1]
        seconds = min(seconds, plays[i][2] - plays[i][1])
        if kind == "dissolve":
            lines.append(f"{picture}[v{i}]xfade=transition=fade:duration={seconds:g}:offset={starts[i]:g}[p{i}]")
        else:
            lines.append(f"{picture}[v{i}]concat=n=2:v=1:a=0,settb=1/{FPS}[p{i}]")
        picture = f"[p{i}]"
    lines.append(f"{picture}trim=0:{at:g}[v]")

    sounds = [f"anullsrc=r={RATE}:cl=mono,atrim=0:{at:g}[silence]"]
    mixed = ["[silence]"]
    for i, (key, start, stop) in enumerate(plays):
        before, after = joins[i - 1] if i else ("cut", 0.0), joins[i]
        early = {"jcut": before[1], "bridge": before[1] / 2, "lcut": -before[1]}.get(before[0], 0.0)  # seconds by which the sound starts before its picture
        late = {"lcut": after[1], "dissolve": after[1], "bridge": after[1] / 2, "jcut": -after[1]}.get(after[0], 0.0)
        begin, end = starts[i] - early, starts[i] + stop - start + late
        gain, music = sound_of(edit, key) if fine else (0.0, None)
        if end <= begin:
            continue
        if sounding[i]:
            source = max(0.0, start - early)
            chain = f"[{i}:a]atrim={source:g}:{source + end - begin:g},asetpts=PTS-STARTPTS,aresample={RATE},aformat=channel_layouts=mono,volume={gain:g}dB"
            for place, (kind, seconds) in (("in", before), ("out", after)):
                fade = {"fade": seconds / 2, "dissolve": seconds, "bridge": seconds}.get(kind, 0.0)
                fade = min(fade, end - begin)
                if fade > 0:
                    chain += f",afade=t={place}:st={0 if place == 'in' else end - begin - fade:g}:d={fade:g}"
            sounds.append(f"{chain},adelay={round(1000 * max(0.0, begin))}:all=1[a{i}]")
            mixed.append(f"[a{i}]")
        if music is not None:
            level = music + 18.06  # the sine source peaks at -18.06 dB
            sounds.append(f"sine=frequency=110:sample_rate={RATE}:duration={stop - start:g},volume={level:g}dB,adelay={round(1000 * starts[i])}:all=1[m{i}]")
            mixed.append(f"[m{i}]")
    sounds.append(f"{''.join(mixed)}amix=inputs={len(mixed)}:normalize=0:duration=longest,atrim=0:{at:g}[a]")
    return ";".join([*lines, *sounds])


def render(task: dict[str, Any], edit: dict[str, Any], out: str | Path, ffmpeg: str = "ffmpeg", folder: str | Path | None = None) -> Path:
    """A preview (mp4) of an edit that is not malformed. folder: where clips of generated shots are kept (None: beside ``out``).

    Raises EditingError without ffmpeg, for an edit that plays nothing, and for media that ffmpeg cannot read.
    """
    ffmpeg, out = find_ffmpeg(ffmpeg), Path(out)
    plays = timeline(task, edit)
    if not plays:
        raise EditingError(f"{out.name}: the edit has no shots, there is nothing to render")
    files = [clip(task, key, Path(folder) if folder is not None else out.parent, ffmpeg).resolve() for key, *_ in plays]
    has_sound = {file: "Audio:" in _probe(file, ffmpeg) for file in dict.fromkeys(files)}
    inputs = [word for file in files for word in ("-i", str(file))]
    text = graph(task, edit, plays, [has_sound[file] for file in files])
    return run(ffmpeg, [*inputs, "-filter_complex", text, "-map", "[v]", "-map", "[a]", *CODECS], out)


def cached_render(task: dict[str, Any], edit: dict[str, Any], folder: Path, ffmpeg: str) -> Path:
    name = hashlib.sha256(json.dumps([task["id"], task["material"], task.get("media", ""), edit], sort_keys=True).encode()).hexdigest()[:24]
    return _once(folder / "previews" / f"{name}.mp4", lambda path: render(task, edit, path, ffmpeg, folder))
