//! `strftime_now`: the date in the C locale, UTC.

/// Formats the time `unix_s` with Python's directives. Unknown directives stay unchanged.
pub(super) fn strftime(unix_s: i64, format: &str) -> String {
    let date = Date::new(unix_s);
    let mut text = String::with_capacity(format.len() + 16);
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let ahead = rest.as_str();
        // %-d is %d without its zeros.
        let unpadded = ahead.starts_with('-');
        let mut after = ahead[usize::from(unpadded)..].chars();
        match after.next().and_then(|directive| date.directive(directive)) {
            Some(field) => {
                rest = after;
                let trimmed = field.trim_start_matches(['0', ' ']);
                text.push_str(match (unpadded, trimmed.is_empty()) {
                    (false, _) => &field,
                    (true, false) => trimmed,
                    (true, true) => "0",
                });
            }
            None => text.push('%'),
        }
    }
    text
}

struct Date {
    year: i64,
    /// 1 to 12.
    month: u8,
    /// 1 to 31.
    day: u8,
    /// 1 to 366.
    day_of_year: u16,
    /// 0 for Sunday.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl Date {
    /// The Gregorian date of a time. Years are clamped to 0 to 9999, as in Python.
    fn new(unix_s: i64) -> Self {
        const DAY_S: i64 = 86_400;
        // 0000-01-01 to 9999-12-31.
        let unix_s = unix_s.clamp(-62_167_219_200, 253_402_300_799);
        let (mut day, second) = (unix_s.div_euclid(DAY_S), unix_s.rem_euclid(DAY_S));
        let weekday = (day + 4).rem_euclid(7) as u8;
        let mut year = 1970;
        // Whole cycles of 400 years first, then at most 400 steps.
        year += 400 * day.div_euclid(146_097);
        day = day.rem_euclid(146_097);
        while day >= days_of_year(year) {
            day -= days_of_year(year);
            year += 1;
        }
        let day_of_year = day as u16 + 1;
        let mut month = 1;
        while day >= days_of_month(year, month) {
            day -= days_of_month(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: day as u8 + 1,
            day_of_year,
            weekday,
            hour: (second / 3600) as u8,
            minute: (second / 60 % 60) as u8,
            second: (second % 60) as u8,
        }
    }

    fn directive(&self, directive: char) -> Option<String> {
        let weekday = WEEKDAYS[self.weekday as usize];
        let month = MONTHS[self.month as usize - 1];
        let hour12 = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => format!("{:04}", self.year),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'w' => self.weekday.to_string(),
            'F' => format!("{:04}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_of_year(year: i64) -> i64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_of_month(year: i64, month: u8) -> i64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;

    /// Expected texts come from Python: `datetime.fromtimestamp(t, timezone.utc).strftime(f)`.
    #[test]
    fn dates_are_those_of_python() {
        for (unix_s, format, expected) in [
            (0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001"),
            (1_721_952_000, "%d %b %Y", "26 Jul 2024"),
            (951_782_400, "%d %B %Y, %a %I %p", "29 February 2000, Tue 12 AM"),
            (4_107_542_399, "%F %T %y %j", "2100-02-28 23:59:59 00 059"),
            (-1, "%F %T", "1969-12-31 23:59:59"),
            (1_735_689_599, "%-d|%e|%-j|%%|%Z|%w", "31|31|366|%|UTC|2"),
            (1_704_067_200, "%-d|%e|%-m|%-H", "1| 1|1|0"),
        ] {
            assert_eq!(strftime(unix_s, format), expected, "{unix_s} {format}");
        }
    }

    #[test]
    fn unknown_directives_and_ends_stay() {
        assert_eq!(strftime(0, "%Q %"), "%Q %");
        assert_eq!(strftime(0, "%-"), "%-");
        assert_eq!(strftime(i64::MAX, "%Y"), "9999");
        assert_eq!(strftime(i64::MIN, "%F"), "0000-01-01");
    }
}
