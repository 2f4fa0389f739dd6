//! A plot as SVG: lines over a logarithmic scale, panel beside panel, each line with its name at its end.
//!
//! It stands on light and on dark pages alike: nothing is behind it, and all its colours are seen on both. It needs no font,
//! style sheet or script from anywhere.

use std::fmt::Write as _;

/// What a plot shows.
pub struct Plot<'a> {
    /// Above all.
    pub title: &'a str,
    /// Of the horizontal axis.
    pub across: &'a str,
    /// From the left to the right.
    pub panels: Vec<Panel<'a>>,
}

/// One of its panels; all have the same axes.
pub struct Panel<'a> {
    /// Above it.
    pub title: &'a str,
    /// Those without points are left out.
    pub lines: Vec<Line<'a>>,
}

/// A line, or a dot where it has one point.
pub struct Line<'a> {
    /// At its end.
    pub name: &'a str,
    /// As SVG has it: `#3b82c4`.
    pub colour: &'a str,
    /// Drawn above the others, and stronger.
    pub emphasised: bool,
    /// Drawn in strokes.
    pub dashed: bool,
    /// Across and up, both above 0; from the left to the right.
    pub points: Vec<(f64, f64)>,
}

const TEXT: &str = "#6e7781";
const GRID: &str = "#8c959f";

/// All in the picture's own units, of which a letter is about twelve high.
const TOP: f64 = 64.0;
const BOTTOM: f64 = 400.0;
const LEFT: f64 = 44.0;
/// Of a panel's lines; then come their names.
const WIDTH: f64 = 250.0;
const NAMES: f64 = 216.0;
/// From one name to the next.
const APART: f64 = 14.0;

impl Plot<'_> {
    /// The whole file.
    pub fn svg(&self) -> String {
        let panel_width = LEFT + WIDTH + NAMES;
        let (width, height) = (panel_width * self.panels.len() as f64, BOTTOM + 48.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
            font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"{TEXT}\">\n"
        );
        let _ = writeln!(svg, "<title>{0}</title>\n{1}", escaped(self.title), text(LEFT, 20.0, "start", 15, true, self.title));
        let scales = Scales::of(self.panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points));
        for (number, panel) in self.panels.iter().enumerate() {
            let _ = writeln!(svg, "<g transform=\"translate({} 0)\">", panel_width * number as f64);
            self.draw(panel, &scales, &mut svg);
            svg.push_str("</g>\n");
        }
        svg + "</svg>\n"
    }

    fn draw(&self, panel: &Panel<'_>, scales: &Scales, svg: &mut String) {
        svg.push_str(&text(LEFT, 46.0, "start", 13, true, panel.title));
        for tick in scales.ticks() {
            let y = scales.y(tick);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{GRID}\" stroke-opacity=\"0.35\"/>{}",
                LEFT + WIDTH,
                text(LEFT - 6.0, y + 4.0, "end", 12, false, &format!("{tick}×"))
            );
        }
        for across in &scales.across {
            svg.push_str(&text(scales.x(*across), BOTTOM + 18.0, "middle", 12, false, &across.to_string()));
        }
        svg.push_str(&text(LEFT + WIDTH / 2.0, BOTTOM + 36.0, "middle", 12, false, self.across));
        let mut lines: Vec<&Line<'_>> = panel.lines.iter().filter(|line| !line.points.is_empty()).collect();
        lines.sort_by_key(|line| line.emphasised);
        for line in &lines {
            draw_line(line, scales, svg);
        }
        let ends: Vec<(f64, f64)> =
            lines.iter().filter_map(|line| line.points.last()).map(|(x, y)| (scales.x(*x), scales.y(*y))).collect();
        let heights = apart(&ends.iter().map(|(_, y)| *y).collect::<Vec<_>>());
        for ((line, (x, y)), height) in lines.iter().zip(ends).zip(heights) {
            let name = LEFT + WIDTH + 26.0;
            let _ = writeln!(
                svg,
                "<polyline points=\"{:.1},{y:.1} {:.1},{height:.1} {:.1},{height:.1}\" fill=\"none\" stroke=\"{}\" stroke-opacity=\"0.5\"/>",
                x + 4.0,
                name - 10.0,
                name - 3.0,
                line.colour
            );
            let weight = if line.emphasised { "bold" } else { "normal" };
            let _ = writeln!(
                svg,
                "<text x=\"{name:.1}\" y=\"{:.1}\" fill=\"{}\" font-weight=\"{weight}\">{}</text>",
                height + 4.0,
                line.colour,
                escaped(line.name)
            );
        }
    }
}

fn draw_line(line: &Line<'_>, scales: &Scales, svg: &mut String) {
    let points: Vec<(f64, f64)> = line.points.iter().map(|(x, y)| (scales.x(*x), scales.y(*y))).collect();
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let (width, dot) = if line.emphasised { (3.0, 4.0) } else { (1.5, 2.5) };
    let dashes = if line.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"{dashes}/>",
        path.join(" "),
        line.colour
    );
    for (x, y) in points {
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{dot}\" fill=\"{}\"/>", line.colour);
    }
}

/// From values to places.
struct Scales {
    /// The values that there are, in order.
    across: Vec<f64>,
    low: f64,
    high: f64,
}

impl Scales {
    fn of<'a>(points: impl Iterator<Item = &'a (f64, f64)>) -> Self {
        let (mut across, mut low, mut high) = (Vec::new(), 1.0_f64, 2.0_f64);
        for (x, y) in points {
            across.push(*x);
            (low, high) = (low.min(*y), high.max(*y));
        }
        across.sort_by(f64::total_cmp);
        across.dedup();
        Self { across, low: low / 1.08, high: high * 1.08 }
    }

    fn x(&self, value: f64) -> f64 {
        let (first, last) = (self.across[0], self.across[self.across.len() - 1]);
        // The first and the last stand a little inside.
        let part = if last > first { (value - first) / (last - first) } else { 0.5 };
        LEFT + 14.0 + part * (WIDTH - 28.0)
    }

    fn y(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        BOTTOM - part * (BOTTOM - TOP)
    }

    /// 1, 2, 5, 10 and so on: those that are in the panel.
    fn ticks(&self) -> Vec<f64> {
        let decades = (0..6).map(|power| 10_f64.powi(power));
        let all = decades.flat_map(|decade| [decade, 2.0 * decade, 5.0 * decade]);
        let fine = if self.high < 4.0 { vec![1.25, 1.5, 3.0] } else { Vec::new() };
        all.chain(fine).filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }
}

/// Moves names that would stand on each other, as little as may be, and none out of the panel if there is room; in the order of
/// what is given.
fn apart(wanted: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|one, other| wanted[*one].total_cmp(&wanted[*other]));
    // Groups that touch become one, around the middle of what its members want: the sum of what they want, each less its place
    // in the group, and the number of them.
    let mut groups: Vec<(f64, usize)> = Vec::new();
    let start = |(sum, count): (f64, usize)| {
        let height = (count - 1) as f64 * APART;
        (sum / count as f64).clamp(TOP, (BOTTOM - height).max(TOP))
    };
    for index in &order {
        let mut group = (wanted[*index], 1);
        while let Some(before) = groups.last().copied().filter(|before| start(*before) + before.1 as f64 * APART > start(group)) {
            groups.pop();
            group = (before.0 + group.0 - group.1 as f64 * before.1 as f64 * APART, before.1 + group.1);
        }
        groups.push(group);
    }
    let places = groups.iter().flat_map(|group| (0..group.1).map(|place| start(*group) + place as f64 * APART));
    let mut heights = vec![0.0; wanted.len()];
    order.iter().zip(places).for_each(|(index, place)| heights[*index] = place);
    heights
}

fn text(x: f64, y: f64, anchor: &str, size: u32, bold: bool, words: &str) -> String {
    let weight = if bold { " font-weight=\"bold\"" } else { "" };
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\"{weight}>{}</text>\n", escaped(words))
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line<'a>(name: &'a str, points: &[(f64, f64)]) -> Line<'a> {
        Line { name, colour: "#0a0b0c", emphasised: false, dashed: false, points: points.to_vec() }
    }

    /// The values of an attribute, in the order of the text.
    fn values(svg: &str, element: &str, attribute: &str) -> Vec<f64> {
        let of = |rest: &str| rest.split_once(&format!(" {attribute}=\""))?.1.split('"').next()?.parse().ok();
        svg.split(&format!("<{element}")).skip(1).filter_map(|rest| of(rest.split_once('>')?.0)).collect()
    }

    #[test]
    fn equal_ratios_are_equal_distances() {
        let panel = Panel { title: "p", lines: vec![line("a", &[(0.7, 1.0), (0.85, 10.0), (0.95, 100.0)])] };
        let svg = Plot { title: "t", across: "load", panels: vec![panel] }.svg();
        let (x, y) = (values(&svg, "circle", "cx"), values(&svg, "circle", "cy"));
        assert_eq!(y.len(), 3);
        assert!(((y[0] - y[1]) - (y[1] - y[2])).abs() < 0.2 && y[0] > y[2], "{y:?}");
        assert!(((x[1] - x[0]) / (x[2] - x[1]) - 1.5).abs() < 0.01, "{x:?}");
        assert!(y.iter().all(|y| (TOP..=BOTTOM).contains(y)));
    }

    #[test]
    fn names_of_lines_that_end_together_stand_apart_in_the_lines_order() {
        let heights = apart(&[200.0, 90.0, 201.0, 200.5, 399.0, 399.5]);
        let mut sorted = heights.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] > APART - 1e-9), "{heights:?}");
        assert!(heights[0] < heights[3] && heights[3] < heights[2] && heights[4] < heights[5], "{heights:?}");
        assert_eq!((heights[1], heights[5]), (90.0, BOTTOM));
        // Around the middle of what they want.
        assert!((heights[3] - 200.5).abs() < 1e-9, "{heights:?}");
    }

    #[test]
    fn a_plot_needs_nothing_from_elsewhere_and_takes_any_name() {
        let panel = Panel { title: "a < b", lines: vec![line("x & y", &[(0.85, 3.0)]), line("none", &[])] };
        let svg = Plot { title: "t", across: "load", panels: vec![panel] }.svg();
        assert!(svg.contains("x &amp; y") && svg.contains("a &lt; b") && !svg.contains("none</text>"));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        for word in ["href", "url(", "<style", "<script", "@import"] {
            assert!(!svg.contains(word), "{word}");
        }
        assert_eq!(svg.matches("http").count(), 1, "the name space only");
        assert_eq!(values(&svg, "circle", "cx"), [LEFT + WIDTH / 2.0]);
    }
}
