//! A plot of latencies by percentile, as SVG.

use std::fmt::Write;

use super::percentiles::nearest_rank;
use super::summary::Summary;

/// Size of the picture, and of the margins left, right, above and below the plot.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 72.0;
const BOTTOM: f64 = 56.0;

/// Thousandths at which a line has a point, and the labelled ones.
const STEP: usize = 5;
const LABELLED: [u64; 7] = [0, 100, 250, 500, 750, 900, 990];

/// The logarithmic axis of times: powers of ten, in microseconds.
struct Decades {
    first: u32,
    last: u32,
}

/// The picture: time to the first token and between tokens, at each percentile.
pub fn svg(summary: &Summary) -> String {
    let series = [
        ("time to first token", "#1f77b4", summary.sorted.ttft_us.as_slice()),
        ("between tokens", "#d62728", summary.sorted.inter_token_us.as_slice()),
    ];
    let decades =
        Decades::of(series.iter().flat_map(|(_, _, sorted)| [sorted.first(), sorted.last()]).flatten());
    let mut picture = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let shape = &summary.shape;
    let title = format!(
        "{}: {} clients, arrivals {}, prompts {} tokens, {} shared, answers {}",
        shape.model,
        shape.clients,
        shape.arrivals,
        shape.prompt_tokens,
        shape.shared_prefix,
        shape.answer_tokens
    );
    text(&mut picture, (LEFT, 24.0), "start", "black", &title);
    axes(&mut picture, &decades);
    for (number, (name, colour, sorted)) in series.into_iter().enumerate() {
        let at = (LEFT + 240.0 * number as f64, 48.0);
        text(&mut picture, at, "start", colour, &format!("{name} ({} samples)", sorted.len()));
        line(&mut picture, &decades, colour, sorted);
    }
    picture.push_str("</svg>\n");
    picture
}

impl Decades {
    /// The powers of ten around these times; 1 ms to 10 ms without any.
    fn of<'a>(times_us: impl Iterator<Item = &'a u64> + Clone) -> Self {
        let power = |us: u64| us.max(1).ilog10();
        let first = times_us.clone().min().map_or(3, |us| power(*us));
        let last = times_us.max().map_or(4, |us| power(*us) + 1);
        Self { first, last }
    }

    /// Height in the picture.
    fn y(&self, us: u64) -> f64 {
        let part = ((us.max(1) as f64).log10() - f64::from(self.first)) / f64::from(self.last - self.first);
        HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP)
    }
}

fn x(permille: u64) -> f64 {
    LEFT + permille as f64 / 1000.0 * (WIDTH - LEFT - RIGHT)
}

fn axes(picture: &mut String, decades: &Decades) {
    for power in decades.first..=decades.last {
        let us = 10u64.saturating_pow(power);
        let y = decades.y(us);
        rule(picture, (LEFT, y), (WIDTH - RIGHT, y));
        text(picture, (LEFT - 8.0, y + 4.0), "end", "black", &format!("{} ms", us as f64 / 1e3));
    }
    for permille in LABELLED {
        rule(picture, (x(permille), TOP), (x(permille), HEIGHT - BOTTOM));
        let label = format!("p{}", permille as f64 / 10.0);
        text(picture, (x(permille), HEIGHT - BOTTOM + 20.0), "middle", "black", &label);
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    text(picture, (middle, HEIGHT - 12.0), "middle", "black", "percentile (nearest rank)");
}

fn line(picture: &mut String, decades: &Decades, colour: &str, sorted: &[u64]) {
    let points = (0..=1000).step_by(STEP).filter_map(|permille| {
        let us = nearest_rank(sorted, permille)?;
        Some(format!("{:.1},{:.1}", x(permille), decades.y(us)))
    });
    let points: Vec<_> = points.collect();
    let _ = writeln!(
        picture,
        "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>",
        points.join(" ")
    );
}

fn rule(picture: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        picture,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(picture: &mut String, at: (f64, f64), anchor: &str, colour: &str, content: &str) {
    let _ = writeln!(
        picture,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{}</text>",
        at.0,
        at.1,
        escaped(content)
    );
}

/// Text for XML. Control characters, which XML forbids, become U+FFFD.
fn escaped(content: &str) -> String {
    let mut out = String::new();
    for c in content.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::fleet::Measured;
    use crate::cli::bench::link::Sample;
    use crate::cli::bench::summary::Shape;

    fn picture(model: &str, samples: Vec<Sample>) -> String {
        let shape = Shape { model: model.into(), ..Shape::default() };
        svg(&Summary::of(shape, &Measured { samples, start_us: 0, interrupted: false, window_min_us: 0 }))
    }

    /// The points of the lines.
    fn lines(picture: &str) -> Vec<Vec<(f64, f64)>> {
        let of = |line: &str| -> Vec<(f64, f64)> {
            let points = line.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
            let pair = |point: &str| {
                let (x, y) = point.split_once(',').unwrap();
                (x.parse().unwrap(), y.parse().unwrap())
            };
            points.split_whitespace().map(pair).collect()
        };
        picture.lines().filter(|line| line.starts_with("<polyline")).map(of).collect()
    }

    #[test]
    fn lines_rise_inside_the_plot() {
        let sample = |number: u64| Sample {
            first_us: Some(10_000 + number * 777),
            gaps_us: vec![number, 3 * number],
            ..Sample::default()
        };
        let lines = lines(&picture("m", (0..50).map(sample).collect()));
        assert_eq!(lines.len(), 2);
        for line in lines {
            assert_eq!(line.len(), 201);
            assert!(
                line.iter().all(|(x, y)| (LEFT..=WIDTH).contains(x) && (TOP..=HEIGHT - BOTTOM).contains(y))
            );
            assert!(line.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 >= two[1].1), "{line:?}");
        }
    }

    #[test]
    fn names_cannot_add_elements_and_nothing_is_a_picture_too() {
        let picture = picture("a<script>&\"\u{1b}", vec![]);
        assert!(picture.contains("a&lt;script&gt;&amp;&quot;\u{fffd}: 0 clients"), "{picture}");
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
        assert!(lines(&picture).iter().all(Vec::is_empty));
    }
}
