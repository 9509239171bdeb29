-- The 26 cantons of Switzerland, their official languages, and well-known lakes and peaks.
-- Cantons, towns, lakes and peaks are stored under a local name, languages under their English name, in every copy.
-- The schema is in English; the Turkish and German copies hold the same tables, columns and rows in the same order.

BEGIN;

-- Area: Federal Statistical Office, total area rounded to 10 km2 (Basel-Stadt to 1 km2). Population: permanent residents on
-- 31 December 2020 (Federal Statistical Office), rounded to thousands. Seats: National Council as elected in 2023 (200 seats),
-- Council of States (46 seats; the six cantons with one seat are the former half-cantons). Year of joining the Confederation:
-- the divided cantons carry the year of the undivided one. Herisau: seat of government of Appenzell Ausserrhoden.
CREATE TABLE canton (
    code TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    capital TEXT NOT NULL,
    area_km2 INTEGER NOT NULL,
    population_thousands INTEGER NOT NULL,
    joined_year INTEGER NOT NULL,
    nc_seats INTEGER NOT NULL,
    cs_seats INTEGER NOT NULL
);

INSERT INTO canton (code, name, capital, area_km2, population_thousands, joined_year, nc_seats, cs_seats) VALUES
    ('ZH', 'Zürich', 'Zürich', 1730, 1553, 1351, 36, 2),
    ('BE', 'Bern', 'Bern', 5960, 1043, 1353, 24, 2),
    ('LU', 'Luzern', 'Luzern', 1490, 416, 1332, 9, 2),
    ('UR', 'Uri', 'Altdorf', 1080, 37, 1291, 1, 2),
    ('SZ', 'Schwyz', 'Schwyz', 910, 162, 1291, 4, 2),
    ('OW', 'Obwalden', 'Sarnen', 490, 38, 1291, 1, 1),
    ('NW', 'Nidwalden', 'Stans', 280, 44, 1291, 1, 1),
    ('GL', 'Glarus', 'Glarus', 690, 41, 1352, 1, 2),
    ('ZG', 'Zug', 'Zug', 240, 129, 1352, 3, 2),
    ('FR', 'Fribourg', 'Fribourg', 1670, 325, 1481, 7, 2),
    ('SO', 'Solothurn', 'Solothurn', 790, 277, 1481, 6, 2),
    ('BS', 'Basel-Stadt', 'Basel', 37, 197, 1501, 4, 1),
    ('BL', 'Basel-Landschaft', 'Liestal', 520, 291, 1501, 7, 1),
    ('SH', 'Schaffhausen', 'Schaffhausen', 300, 83, 1501, 2, 2),
    ('AR', 'Appenzell Ausserrhoden', 'Herisau', 240, 55, 1513, 1, 1),
    ('AI', 'Appenzell Innerrhoden', 'Appenzell', 170, 16, 1513, 1, 1),
    ('SG', 'St. Gallen', 'St. Gallen', 2030, 515, 1803, 12, 2),
    ('GR', 'Graubünden', 'Chur', 7110, 200, 1803, 5, 2),
    ('AG', 'Aargau', 'Aarau', 1400, 694, 1803, 16, 2),
    ('TG', 'Thurgau', 'Frauenfeld', 990, 283, 1803, 6, 2),
    ('TI', 'Ticino', 'Bellinzona', 2810, 351, 1803, 8, 2),
    ('VD', 'Vaud', 'Lausanne', 3210, 815, 1803, 19, 2),
    ('VS', 'Valais', 'Sion', 5220, 349, 1815, 8, 2),
    ('NE', 'Neuchâtel', 'Neuchâtel', 800, 176, 1815, 4, 2),
    ('GE', 'Genève', 'Genève', 280, 506, 1815, 12, 2),
    ('JU', 'Jura', 'Delémont', 840, 74, 1979, 2, 2);

-- Switzerland's four national languages; codes: ISO 639-1.
CREATE TABLE language (
    code TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);

INSERT INTO language (code, name) VALUES
    ('de', 'German'),
    ('fr', 'French'),
    ('it', 'Italian'),
    ('rm', 'Romansh');

-- Official languages (source: the cantonal constitutions).
CREATE TABLE canton_language (
    canton_code TEXT NOT NULL REFERENCES canton(code),
    language_code TEXT NOT NULL REFERENCES language(code),
    PRIMARY KEY (canton_code, language_code)
);

INSERT INTO canton_language (canton_code, language_code) VALUES
    ('ZH', 'de'),
    ('BE', 'de'),
    ('BE', 'fr'),
    ('LU', 'de'),
    ('UR', 'de'),
    ('SZ', 'de'),
    ('OW', 'de'),
    ('NW', 'de'),
    ('GL', 'de'),
    ('ZG', 'de'),
    ('FR', 'de'),
    ('FR', 'fr'),
    ('SO', 'de'),
    ('BS', 'de'),
    ('BL', 'de'),
    ('SH', 'de'),
    ('AR', 'de'),
    ('AI', 'de'),
    ('SG', 'de'),
    ('GR', 'de'),
    ('GR', 'it'),
    ('GR', 'rm'),
    ('AG', 'de'),
    ('TG', 'de'),
    ('TI', 'it'),
    ('VD', 'fr'),
    ('VS', 'de'),
    ('VS', 'fr'),
    ('NE', 'fr'),
    ('GE', 'fr'),
    ('JU', 'fr');

-- Area: the whole lake, parts abroad included, rounded to 1 km2; elevation of the usual water level (Federal Office of Topography,
-- Federal Statistical Office). Year of the dam: when the dam of a reservoir was completed, empty for natural lakes.
CREATE TABLE lake (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    area_km2 INTEGER NOT NULL,
    elevation_m INTEGER NOT NULL,
    dam_year INTEGER
);

INSERT INTO lake (id, name, area_km2, elevation_m, dam_year) VALUES
    (1, 'Lac Léman', 580, 372, NULL),
    (2, 'Bodensee', 536, 395, NULL),
    (3, 'Lac de Neuchâtel', 218, 429, NULL),
    (4, 'Lago Maggiore', 213, 193, NULL),
    (5, 'Vierwaldstättersee', 114, 434, NULL),
    (6, 'Zürichsee', 88, 406, NULL),
    (7, 'Lago di Lugano', 49, 271, NULL),
    (8, 'Thunersee', 48, 558, NULL),
    (9, 'Bielersee', 39, 429, NULL),
    (10, 'Zugersee', 38, 413, NULL),
    (11, 'Brienzersee', 30, 564, NULL),
    (12, 'Walensee', 24, 419, NULL),
    (13, 'Murtensee', 23, 429, NULL),
    (14, 'Sempachersee', 14, 504, NULL),
    (15, 'Sihlsee', 11, 889, 1937),
    (16, 'Hallwilersee', 10, 449, NULL),
    (17, 'Lac de Joux', 9, 1004, NULL),
    (18, 'Wägitalersee', 4, 900, 1924),
    (19, 'Lac des Dix', 4, 2364, 1961);

-- Cantons with a share of the lake.
CREATE TABLE lake_canton (
    lake_id INTEGER NOT NULL REFERENCES lake(id),
    canton_code TEXT NOT NULL REFERENCES canton(code),
    PRIMARY KEY (lake_id, canton_code)
);

INSERT INTO lake_canton (lake_id, canton_code) VALUES
    (1, 'GE'),
    (1, 'VD'),
    (1, 'VS'),
    (2, 'SG'),
    (2, 'SH'),
    (2, 'TG'),
    (3, 'BE'),
    (3, 'FR'),
    (3, 'NE'),
    (3, 'VD'),
    (4, 'TI'),
    (5, 'LU'),
    (5, 'NW'),
    (5, 'OW'),
    (5, 'SZ'),
    (5, 'UR'),
    (6, 'SG'),
    (6, 'SZ'),
    (6, 'ZH'),
    (7, 'TI'),
    (8, 'BE'),
    (9, 'BE'),
    (9, 'NE'),
    (10, 'LU'),
    (10, 'SZ'),
    (10, 'ZG'),
    (11, 'BE'),
    (12, 'GL'),
    (12, 'SG'),
    (13, 'FR'),
    (13, 'VD'),
    (14, 'LU'),
    (15, 'SZ'),
    (16, 'AG'),
    (16, 'LU'),
    (17, 'VD'),
    (18, 'SZ'),
    (19, 'VS');

-- Elevation: Federal Office of Topography, rounded to 10 m. First ascent: the day given in the usual Alpine histories, empty where
-- none is on record (Finsteraarhorn: the ascent of 1829, which nobody disputes).
CREATE TABLE peak (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    elevation_m INTEGER NOT NULL,
    first_ascent DATE
);

INSERT INTO peak (id, name, elevation_m, first_ascent) VALUES
    (1, 'Dufourspitze', 4630, '1855-08-01'),
    (2, 'Dom', 4550, '1858-09-11'),
    (3, 'Weisshorn', 4510, '1861-08-19'),
    (4, 'Matterhorn', 4480, '1865-07-14'),
    (5, 'Dent Blanche', 4360, '1862-07-18'),
    (6, 'Grand Combin', 4310, '1859-07-30'),
    (7, 'Finsteraarhorn', 4270, '1829-08-10'),
    (8, 'Aletschhorn', 4190, '1859-06-18'),
    (9, 'Jungfrau', 4160, '1811-08-03'),
    (10, 'Mönch', 4110, '1857-08-15'),
    (11, 'Schreckhorn', 4080, '1861-08-16'),
    (12, 'Piz Bernina', 4050, '1850-09-13'),
    (13, 'Eiger', 3970, '1858-08-11'),
    (14, 'Dammastock', 3630, '1864-07-28'),
    (15, 'Tödi', 3610, '1824-09-01'),
    (16, 'Piz Kesch', 3420, '1846-08-07'),
    (17, 'Rheinwaldhorn', 3400, NULL),
    (18, 'Titlis', 3240, NULL),
    (19, 'Säntis', 2500, NULL);

-- Cantons that meet at, or hold, the summit.
CREATE TABLE peak_canton (
    peak_id INTEGER NOT NULL REFERENCES peak(id),
    canton_code TEXT NOT NULL REFERENCES canton(code),
    PRIMARY KEY (peak_id, canton_code)
);

INSERT INTO peak_canton (peak_id, canton_code) VALUES
    (1, 'VS'),
    (2, 'VS'),
    (3, 'VS'),
    (4, 'VS'),
    (5, 'VS'),
    (6, 'VS'),
    (7, 'BE'),
    (7, 'VS'),
    (8, 'VS'),
    (9, 'BE'),
    (9, 'VS'),
    (10, 'BE'),
    (10, 'VS'),
    (11, 'BE'),
    (12, 'GR'),
    (13, 'BE'),
    (14, 'UR'),
    (14, 'VS'),
    (15, 'GL'),
    (15, 'GR'),
    (16, 'GR'),
    (17, 'GR'),
    (17, 'TI'),
    (18, 'BE'),
    (18, 'OW'),
    (19, 'AI'),
    (19, 'AR'),
    (19, 'SG');

COMMIT;
