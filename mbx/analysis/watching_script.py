"""Style, body and script of the page that `mbx.analysis.watching` writes."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:24px;max-width:1100px;
background:var(--page);color:var(--ink)}
h1{font-size:22px;margin:0}.quiet{color:var(--quiet);margin:4px 0 12px}
.board{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:12px}
label{display:flex;gap:10px;align-items:center;margin:6px 0}
label span{min-width:110px}input[type=range]{flex:1}button{min-width:70px}
canvas{width:100%;height:auto;display:block}#picture{width:100%;max-width:260px;display:block}
.key{display:inline-block;width:18px;height:3px;vertical-align:middle;margin:0 4px 0 12px}
"""

BODY = """<h1>TITLE</h1><p class="quiet">WORDS</p>
<label><span id="step-name"></span><input type="range" id="step" min="0" value="0" step="1"
aria-label="step"><button id="play" type="button">Play</button></label>
<label><span id="round-name"></span><input type="range" id="round" min="0" value="0" step="1"
aria-label="round"></label>
<p class="quiet"><i class="key" style="background:var(--quiet)"></i>candidates
<i class="key" style="background:var(--line0)"></i>elites of the round
<i class="key" style="background:var(--line2)"></i>mean of the whole plan
<i class="key" style="background:var(--line1)"></i>the action that was taken</p>
<div class="board">
<figure id="frame"><figcaption>the state</figcaption><img id="picture" alt="the state"></figure>
<figure><figcaption>candidates: the actions they plan, step by step</figcaption>
<canvas id="plans" width="720" height="440"></canvas></figure>
<figure><figcaption>their scores, by the first action</figcaption>
<canvas id="scores" width="720" height="440"></canvas></figure>
<div>RETURNS<p class="quiet"><i class="key" style="background:var(--line0)"></i>predicted: mean
score of the last round's elites
<i class="key" style="background:var(--line1)"></i>realised: rewards that
followed, discounted</p></div>
</div><p id="said"></p>
"""

SCRIPT = """
const data = JSON.parse(document.getElementById('data').textContent);
const at = id => document.getElementById(id);
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const colors = {quiet: '--quiet', elite: '--line0', action: '--line1', mean: '--line2'};
const box = {left: 60, right: 20, top: 16, bottom: 40};
function clear(canvas, low, high, label) {
  const pen = canvas.getContext('2d');
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.font = '20px system-ui, sans-serif';
  pen.fillStyle = color('--quiet');
  const place = share => canvas.height - box.bottom
    - share * (canvas.height - box.top - box.bottom);
  for (const share of [0, 0.5, 1]) {
    pen.strokeStyle = color('--grid');
    pen.beginPath();
    pen.moveTo(box.left, place(share));
    pen.lineTo(canvas.width - box.right, place(share));
    pen.stroke();
    const value = low + share * (high - low);
    pen.fillText(+value.toPrecision(3), 2, place(share) + 6);
  }
  pen.fillText(label, box.left, canvas.height - 8);
  return [pen, value => place((value - low) / ((high - low) || 1))];
}
function draw() {
  const step = data.steps[+at('step').value];
  at('round').max = step.rounds.length - 1;
  const number = +at('round').value, round = step.rounds[number];
  at('step-name').textContent = `step ${step.number} of ${data.length}`;
  at('round-name').textContent = `round ${number + 1} of ${step.rounds.length}`;
  const width = at('plans').width - box.left - box.right;
  const horizon = round.actions[0].length, dims = round.actions[0][0].length;
  const [pen, up] = clear(at('plans'), -1, 1,
    horizon > 1 ? `${horizon} steps ahead` + (dims > 1 ? `, ${dims} action dimensions` : '')
      : `${dims} action dimension${dims > 1 ? 's' : ''}, one step ahead`);
  const part = width / dims;
  const line = (actions, ink, thick, alpha) => {
    pen.strokeStyle = color(ink);
    pen.fillStyle = color(ink);
    pen.lineWidth = thick;
    pen.globalAlpha = alpha;
    for (let d = 0; d < dims; d++) {
      const x = t => box.left + part * (d + (horizon > 1 ? 0.05 + 0.9 * t / (horizon - 1) : 0.5));
      pen.beginPath();
      actions.forEach((a, t) => pen.lineTo(x(t), up(a[d] / 100)));
      pen.stroke();
      actions.forEach((a, t) => {
        pen.beginPath();
        pen.arc(x(t), up(a[d] / 100), thick + 1, 0, 7);
        pen.fill();
      });
    }
    pen.globalAlpha = 1;
  };
  const count = round.actions.length;
  for (let i = count - 1; i >= 0; i--) {
    const elite = i < step.elites;
    line(round.actions[i], elite ? colors.elite : colors.quiet, elite ? 2.5 : 1.2,
      elite ? 0.8 : 0.35);
  }
  line(step.mean, colors.mean, 4, 1);
  line([step.action], colors.action, 7, 1);
  const low = Math.min(...round.values.filter(v => v !== null));
  const high = Math.max(...round.values.filter(v => v !== null));
  const [brush, height] = clear(at('scores'), low, high, 'first action, -1 to 1 (first dimension)');
  const across = action => box.left + (action / 100 + 1) / 2 * width;
  for (let i = count - 1; i >= 0; i--) {
    if (round.values[i] === null) continue;
    brush.fillStyle = color(i < step.elites ? colors.elite : colors.quiet);
    brush.globalAlpha = i < step.elites ? 0.9 : 0.5;
    brush.beginPath();
    brush.arc(across(round.actions[i][0][0]), height(round.values[i]), 6, 0, 7);
    brush.fill();
  }
  brush.globalAlpha = 1;
  brush.strokeStyle = color(colors.action);
  brush.lineWidth = 4;
  brush.beginPath();
  brush.moveTo(across(step.action[0]), box.top);
  brush.lineTo(across(step.action[0]), at('scores').height - box.bottom);
  brush.stroke();
  at('frame').style.display = step.picture ? '' : 'none';
  if (step.picture) at('picture').src = step.picture;
  const i = +at('step').value;
  at('said').textContent = `Predicted ${data.predicted[i]}, realised ${data.realised[i]}; `
    + `reward of the step ${step.reward}; action `
    + step.action.map(a => (a / 100).toFixed(2)).join(', ');
}
at('step').max = data.steps.length - 1;
at('round').max = data.steps[0].rounds.length - 1;
at('step').addEventListener('input', draw);
at('round').addEventListener('input', draw);
let timer = null;
at('play').addEventListener('click', () => {
  if (timer !== null) {
    clearInterval(timer);
    timer = null;
    at('play').textContent = 'Play';
    return;
  }
  at('play').textContent = 'Stop';
  timer = setInterval(() => {
    at('step').value = (+at('step').value + 1) % data.steps.length;
    draw();
  }, 200);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
draw();
"""
